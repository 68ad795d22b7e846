"""CONFIGCTX: a dynamo setting made in the main thread is not there in worker threads."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch._dynamo.config as dynamo_config


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    seen: list[bool] = []

    def worker() -> None:
        with scope(object()):
            seen.append(dynamo_config.force_compile_during_fx_trace)

    dynamo_config.force_compile_during_fx_trace = True
    thread = threading.Thread(target=worker)
    thread.start()
    thread.join(patience_s)
    shown = seen != [True]
    print(
        f"CONFIGCTX {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"set to True in the main thread, a worker thread reads {seen}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
