"""Target devices feed drafter devices: one thread a device, one bounded ordered queue, one failure stops all."""
