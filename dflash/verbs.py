"""The shorter verbs: evaluate, generate, export; each returns the exit code."""

import json
from dataclasses import asdict

import torch

from dflash.config import EvaluateConfig, ExportConfig, GenerateConfig, TargetOptions
from dflash.data.chat import Conversation
from dflash.data.prompts import heldout_prompts
from dflash.data.template import prompt_ids
from dflash.decode import speculative_generate
from dflash.errors import ConfigError, DataError
from dflash.evaluate import evaluate as measure
from dflash.export.formats import WRITERS, compare, read_export
from dflash.log import RunLog
from dflash.outcome import counted, evaluation_rows
from dflash.trained import open_trained


def evaluate(config: EvaluateConfig) -> int:
    """Speculative decoding on held-out prompts, beside plain greedy decoding."""
    trained = open_trained(config.drafter, _target(config.target), config.device, config.trust_remote_code)
    source = config.prompts or (trained.config.data.heldout if trained.config else None)
    if source is None:
        raise ConfigError("held-out prompts", "none", "an export has none of its own: give --prompts FILE")
    prompts = heldout_prompts(source, trained.target.tokenizer, config.limit or None)
    if not prompts:
        raise DataError("at least one prompt", "none", "see --prompts", where=source)
    measured = measure(trained.target, trained.drafter, prompts, config.max_new_tokens)
    if config.json:
        print(json.dumps({"drafter": str(trained.source), **asdict(measured)}))
    else:
        RunLog().table(f"{trained.source}, {counted(len(prompts), 'prompt')}", [], evaluation_rows(measured))
    return 0


def generate(config: GenerateConfig) -> int:
    """Answers one prompt; the text goes to standard output, the figures after it."""
    trained = open_trained(config.drafter, _target(config.target), config.device, config.trust_remote_code)
    tokenizer = trained.target.tokenizer
    prompt = prompt_ids(tokenizer, [Conversation([{"role": "user", "content": config.prompt}])])[0]
    made = speculative_generate(
        trained.target,
        trained.drafter,
        prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        generator=torch.Generator(trained.target.device).manual_seed(config.seed),
    )
    print(tokenizer.decode(made.tokens, skip_special_tokens=True))
    per_forward = len(made.tokens) / made.target_forwards
    tok_s = len(made.tokens) / made.seconds
    print(f"[{len(made.tokens)} tokens, {per_forward:.2f} a target forward, {tok_s:.1f} tok/s]")
    return 0


def export(config: ExportConfig) -> int:
    """Writes the drafter in the asked format, reads it back and compares the logits."""
    trained = open_trained(config.drafter, _target(config.target), "cpu", config.trust_remote_code)
    WRITERS[config.format](trained.drafter, trained.target, config.output)
    again = read_export(config.output)
    again.bind_target(trained.target.embedding, trained.target.head)
    difference = compare(trained.drafter, again)
    print(f"{trained.source} -> {config.output} ({config.format})")
    print(f"read back: logits differ by at most {difference:.3g}")
    return 0


def _target(path: str | None) -> TargetOptions | None:
    return None if path is None else TargetOptions(path=path)
