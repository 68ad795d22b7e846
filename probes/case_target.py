"""The program of the case, small enough for a CPU: a drafter's configuration, construction, forward and backward.

Run by name only (`python -m probes.case_target`), because no probe may import dflash. One thread by default; with
`--threads N` each thread builds a drafter of its own and compiles its attention in its first step, as in the case.
It prints the loss and a digest of all gradients, so that two runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import threading
import warnings
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from probes.fx_recorder import phase

TARGET_LAYER_IDS = (1, 16, 31, 46, 61)
TARGET_LAYERS = 64
VOCABULARY = 248_320
MASK_TOKEN_ID = 248_070
SEED = 0


class BareCompile:
    """The case's own way: `torch.compile` on the attention, lazily, with nothing round it."""

    name = "bare-compile"
    leaves_open = "every race: it is the case as it was reported"

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler

    def compile(self, fn: Any, *, role: str) -> Any:
        """A compiled `fn` of its own for this drafter, so that every thread has a first compile."""
        return torch.compile(fn, dynamic=False, backend=self.compiler)

    def thread_scope(self) -> AbstractContextManager[None]:
        """Nothing round a thread."""
        return nullcontext()

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Nothing round a step."""
        return nullcontext()


def build(options: argparse.Namespace) -> Any:
    """Configuration and construction, each a phase of its own."""
    from transformers import Qwen3Config

    from dflash import DFlashDrafter, create_drafter_config

    with phase("configuration"):
        target_config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=options.width,
            intermediate_size=2 * options.width,
            num_hidden_layers=TARGET_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=options.width // 4,
        )
        config = create_drafter_config(target_config, num_draft_layers=options.layers)
    with phase("construction"):
        drafter = DFlashDrafter(
            config,
            target_layer_ids=list(TARGET_LAYER_IDS),
            block_size=32,
            max_anchors=options.anchors,
            mask_token_id=MASK_TOKEN_ID,
        )
        drafter.use_attention(_backend(options))
    return drafter


def _backend(options: argparse.Namespace) -> Any:
    from dflash.attention.select import choose

    if options.strategy == BareCompile.name:
        return replace(
            choose("locked-compile", "auto", "cpu"), strategy=BareCompile(options.compiler), reason="the case's own way"
        )
    return choose(options.strategy, "auto", "cpu")


def step(drafter: Any, options: argparse.Namespace) -> str:
    """One forward and backward on seeded inputs: shapes of the case with T = `--tokens`, H = `--width`."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, width = options.tokens, options.width
    inputs = {
        "all_hidden_states": torch.randn(1, tokens, len(TARGET_LAYER_IDS), width, generator=generator),
        "verifier_last_hidden": torch.randn(1, tokens, width, generator=generator),
        "input_ids": torch.randint(0, 1000, (1, tokens), generator=generator),
        "loss_mask": torch.ones(1, tokens, dtype=torch.bool),
        "lengths": torch.tensor([tokens]),
        "position_ids": torch.arange(1, tokens + 1)[None],
    }
    with phase("forward"):
        loss, _ = drafter(**inputs, use_soft_labels=True, gamma=10.0)
    with phase("backward"):
        loss.backward()
    return f"loss {loss.item():.9f} gradients {_digest(drafter)}"


def _digest(drafter: Any) -> str:
    state = hashlib.sha256()
    for parameter in drafter.parameters():
        state.update(parameter.grad.numpy().tobytes())
    return state.hexdigest()[:16]


def worker(options: argparse.Namespace, start: threading.Barrier, lines: list[str]) -> None:
    """A thread of the case: builds, waits for the others, steps; a failed step is a line of the log."""
    drafter = build(options)
    start.wait()
    for number in range(options.steps):
        drafter.zero_grad()
        try:
            lines.append(step(drafter, options))
        except RuntimeError as error:
            lines.append(f"step {number} raised {type(error).__name__}: {str(error).splitlines()[0][:100]}")


def main(argv: Sequence[str]) -> int:
    """Run the case; 1 when a step raised."""
    parser = argparse.ArgumentParser(prog="python -m probes.case_target", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--strategy", default=BareCompile.name)
    parser.add_argument(
        "--compiler", default="inductor", help="backend of bare-compile; aot_eager needs no C++ compiler"
    )
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--anchors", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="no target bound")  # the case's script has no target either
    start = threading.Barrier(options.threads)
    lines: list[list[str]] = [[] for _ in range(options.threads)]
    if options.threads == 1:
        worker(options, start, lines[0])
    else:
        torch.compile(torch.neg, backend="eager")(torch.ones(1))  # torch 2.11 crashes when workers compile first
        threads = [
            threading.Thread(target=worker, args=(options, start, own), name=f"drafter-{index}")
            for index, own in enumerate(lines)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, own in enumerate(lines):
        for line in own:
            print(f"drafter {index}: {line}")
    return int(any("raised" in line for own in lines for line in own))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
