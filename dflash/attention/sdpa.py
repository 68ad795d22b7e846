"""Strategy sdpa: the dense-mask kernel, uncompiled; touches no tracing or compiling state, so threads cannot race on it."""

from dflash.attention.eager import Eager


class Sdpa(Eager):
    """No dynamo at all; memory O(Q x S) bool for the mask. Only the sdpa kernel may run under it (select.py)."""

    name = "sdpa"
