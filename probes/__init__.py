"""Probes: what tracing and compiling do to a torch process, thread by thread. Each is `python -m probes.<name>`."""
