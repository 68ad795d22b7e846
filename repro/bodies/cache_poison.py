"""CACHEPOISON: code degraded by ANNOTATE is cached on disk as the clean graph's; a later healthy process runs it."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._inductor.utils import run_and_get_code

from repro.bodies import annotate_degrade


def later_process() -> int:
    """Eager calls of aten.sin in the code that one thread, with no mask builder, gets for the same function."""
    function = torch.compile(lambda x: torch.sin(x) * 1.1 + 1, dynamic=False)
    _, code = run_and_get_code(function, torch.ones(8))
    return int(code[0].count("torch.ops.aten.sin"))


def count_in_later_process() -> int:
    result = subprocess.run(
        [sys.executable, "-m", "repro.bodies.cache_poison", "later"], capture_output=True, text=True, check=True
    )
    match = re.search(r"later process: (\d+)", result.stdout)
    assert match is not None, result.stdout
    return int(match[1])


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        annotate_degrade.main(scope, patience_s)
        poisoned = count_in_later_process()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        clean = count_in_later_process()
    shown = poisoned > clean
    print(
        f"CACHEPOISON {'shown' if shown else 'not shown'} on torch {torch.__version__}: a later process runs "
        f"{poisoned} eager calls of aten.sin from the cache, {clean} with an empty cache"
    )
    return int(shown)


if __name__ == "__main__":
    if "later" in sys.argv:
        print(f"later process: {later_process()}")
    else:
        sys.exit(main())
