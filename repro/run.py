"""`python -m repro.run fx_flag [--strategy NAME]`: one body in this process, with a strategy in force.

Exit codes: 0 the fault did not show, 1 it did, 77 skipped, 2 wrong arguments, anything else the body is broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from probes.torch_internals import not_at_rest, snapshot
from repro.child import CLEAN, SHOWN
from repro.strategy import UnknownStrategy, in_force

# a body that waits for a thread which the strategy rightly holds back gives up after this long
_PATIENCE_S = {False: 30.0, True: 4.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the body; under a strategy, state left behind counts as the fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("body")
    parser.add_argument("--strategy", default=None)
    chosen = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    body = importlib.import_module(f"repro.bodies.{chosen.body}")
    try:
        with in_force(chosen.strategy) as scope:
            code: int = body.main(scope, _PATIENCE_S[chosen.strategy is not None])
            leaked = not_at_rest(snapshot())
    except UnknownStrategy as error:
        print(error, file=sys.stderr)
        return 2
    if leaked:
        print(f"left behind: {'; '.join(map(str, leaked))}")
    return SHOWN if leaked and code == CLEAN and chosen.strategy is not None else code


def leave(code: int) -> None:
    """End at once: threads that a deadlock left behind must not hold the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
