"""Conversations in, fixed-shape batches out; import the modules by name, this package imports nothing by itself."""
