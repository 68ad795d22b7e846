"""Fixed-shape measurements: `dflash bench NAME`; nothing heavy is imported until one is run."""

from collections.abc import Callable

USAGE = """\
usage: dflash bench NAME [OPTIONS]

  step         one optimizer step of a preset: ms, tokens a second, peak memory; fixed shape and seed
  pipeline     targets and drafters as threads: end-to-end tokens a second beside each side alone
  strategies   every attention strategy, several threads, cold caches: does it live, cold start, tokens a second

examples
  dflash bench step --preset tiny
  dflash bench step --preset tiny --attn-strategy locked-compile --bench.steps 50 --json
  dflash bench pipeline --preset tiny --targets cpu --drafters cpu
  dflash bench strategies --threads 3 --json strategies.json --plot strategies.png
"""


def _step(words: list[str]) -> int:
    from dflash.bench.step import main

    return main(words)


def _pipeline(words: list[str]) -> int:
    from dflash.bench.pipeline import main

    return main(words)


def _strategies(words: list[str]) -> int:
    from dflash.bench.strategies import main

    return main(words)


BENCHES: dict[str, Callable[[list[str]], int]] = {"step": _step, "pipeline": _pipeline, "strategies": _strategies}
