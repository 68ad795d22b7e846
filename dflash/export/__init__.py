"""Exports: the drafter in the formats other tools load, and back; `zlab` and `speculators`."""
