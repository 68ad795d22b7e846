"""EAGERFLEX, the victim: a warm compiled function raises while other threads call flex_attention eagerly with grad."""

import sys
import warnings
from contextlib import nullcontext

import torch

from repro.bodies.eager_flex import Scope, stress


def main(scope: Scope = nullcontext, patience_s: float = 20.0) -> int:
    warnings.simplefilter("ignore")
    counts = stress(scope)
    shown = counts["compiled failed"] > 0
    print(
        f"EAGERFLEX-VICTIM {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"{counts['compiled failed']} of {counts['compiled']} calls of a warm compiled function raised"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
