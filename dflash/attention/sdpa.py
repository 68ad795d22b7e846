"""Strategy sdpa: the dense-mask kernel, uncompiled; touches no tracing or compiling state, so nothing can race."""

from dflash.attention.eager import Eager


class Sdpa(Eager):
    """No dynamo at all; memory O(Q x S) bool for the mask. Only the sdpa kernel may run under it (select.py)."""

    name = "sdpa"
    leaves_open = ""
