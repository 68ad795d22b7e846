"""Real speculative decoding on held-out prompts: acceptance, speed-up, and whether the text stayed the target's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from dflash.decode import Drafter, Generation, greedy_generate, speculative_generate
from dflash.errors import DataError
from dflash.target import Target

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """Sums and means over the prompts of one evaluation.

    tau                        mean tokens a block gives: matching drafted tokens plus the target's own one
    conditional_acceptance     for slot k = 1..K-1: share of right tokens where all earlier slots were right
    tokens_per_target_forward  generated tokens / target forwards, prompts' forwards and re-runs included
    speedup                    seconds of plain greedy decoding / seconds of speculative decoding; none: not measured
    identical                  prompts whose text equals the target's own greedy text; none: not measured
    """

    tau: float
    conditional_acceptance: tuple[float, ...]
    tokens_per_target_forward: float
    speedup: float | None
    identical: int | None
    prompts: int
    tokens: int
    blocks: int
    seconds: float
    baseline_seconds: float | None


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    progress: Progress | None = None,
    baseline: bool = True,
) -> Evaluation:
    """Decodes every prompt speculatively and, with `baseline`, plainly too; both are timed side by side.

    `progress(done, total)` is called after each prompt. The drafter is in eval() meanwhile and put back afterwards.
    """
    if not prompts:
        raise DataError("at least one held-out prompt", "none", "check the held-out file")
    runs: list[Generation] = []
    plain: list[Generation] = []
    with evaluating(drafter):
        _warm_up(target, drafter, prompts[0], baseline)
        for number, prompt in enumerate(prompts, start=1):
            runs.append(speculative_generate(target, drafter, prompt, max_new_tokens=max_new_tokens))
            if baseline:
                plain.append(greedy_generate(target, prompt, max_new_tokens=max_new_tokens))
            if progress is not None:
                progress(number, len(prompts))
    return summarize(runs, plain, drafter.block_size - 1)


def summarize(runs: Sequence[Generation], plain: Sequence[Generation], slots: int) -> Evaluation:
    """The Evaluation of speculative `runs` and, when not empty, the `plain` run of each."""
    accepted = [n for run in runs for n in run.accepted]
    offered = [n for run in runs for n in run.offered]
    tokens = sum(len(run.tokens) for run in runs)
    seconds = sum(run.seconds for run in runs)
    plain_seconds = sum(run.seconds for run in plain) if plain else None
    return Evaluation(
        tau=1 + sum(accepted) / len(accepted) if accepted else 1.0,
        conditional_acceptance=conditional_acceptance(accepted, offered, slots),
        tokens_per_target_forward=tokens / sum(run.target_forwards for run in runs),
        speedup=plain_seconds / seconds if plain_seconds is not None else None,
        identical=sum(a.tokens == b.tokens for a, b in zip(runs, plain, strict=True)) if plain else None,
        prompts=len(runs),
        tokens=tokens,
        blocks=len(accepted),
        seconds=seconds,
        baseline_seconds=plain_seconds,
    )


def conditional_acceptance(accepted: Sequence[int], offered: Sequence[int], slots: int) -> tuple[float, ...]:
    """Share of blocks right at slot k among those offered slot k whose earlier slots were right; 0 when none was."""
    rates = []
    for k in range(1, slots + 1):
        reached = sum(a >= k - 1 and o >= k for a, o in zip(accepted, offered, strict=True))
        right = sum(a >= k for a in accepted)
        rates.append(right / reached if reached else 0.0)
    return tuple(rates)


@contextmanager
def evaluating(drafter: Drafter) -> Iterator[None]:
    """Puts a drafter module in eval() and restores each submodule's own mode on exit."""
    modes = [(m, m.training) for m in drafter.modules()] if isinstance(drafter, nn.Module) else []
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _warm_up(target: Target, drafter: Drafter, prompt: Sequence[int], baseline: bool) -> None:
    """First calls allocate and choose kernels; they must not count against either side."""
    speculative_generate(target, drafter, prompt, max_new_tokens=drafter.block_size)
    if baseline:
        greedy_generate(target, prompt, max_new_tokens=2)
