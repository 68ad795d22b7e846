"""Every race of torch.compile and FX tracing, on demand: `pytest repro/ -k race`, `python -m repro.bodies.fx_flag`."""
