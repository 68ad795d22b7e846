"""The two ends of a run: the header that says what runs and why, and the closing evaluation, export and table."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from dflash import checkpoint
from dflash.config import TrainConfig
from dflash.data.rows import batches_per_epoch
from dflash.evaluate import Evaluation, evaluate
from dflash.log import RunLog
from dflash.parts import Parts
from dflash.pipeline.replicas import beside_target
from dflash.progress import load_weights
from dflash.run_directory import RunDirectory, replace_text
from dflash.signals import EvaluationAbandoned
from dflash.target import choose_layer_ids

SLOWER = (
    "slower here with this drafter than without one: train longer or on more data, make the drafter smaller "
    "(--drafter.layers, --drafter.block-size), or measure with a large target on a GPU"
)


def header(config: TrainConfig, parts: Parts) -> dict[str, str]:
    """What a run prints first."""
    target, drafter, store = parts.target, parts.drafter, parts.store
    size = sum(parameter.numel() for parameter in parts.parameters.values())
    per_epoch = batches_per_epoch(store, config.data, config.seed, 0)
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in store.meta.counts.items() if count)
    rows = {
        "target": f"{config.target.path}: {target.n_layers} layers of {target.hidden_size}, vocabulary "
        f"{target.vocab_size}, {config.target.dtype}, {millions(sum(p.numel() for p in target.model.parameters()))}",
        "drafter": f"{millions(size)} in {config.drafter.layers} layers, blocks of {drafter.block_size}, up to "
        f"{drafter.max_anchors} a row, target layers {list(drafter.target_layer_ids)}, mask {drafter.mask_token_id}",
        "attention": str(parts.attention),
        "data": f"{len(store)} documents ({counts}), {store.meta.tokens} tokens, {store.meta.supervised_tokens} "
        f"supervised, {counted(per_epoch, 'batch', 'batches')} an epoch; "
        f"{counted(len(parts.prompts), 'held-out prompt')}",
        "devices": f"{parts.placement}, {config.dtype} arithmetic, {torch.get_num_threads()} threads",
        "torch": f"{torch.__version__}, seed {config.seed}",
        "output": str(config.output),
    }
    if repeated := repeated_layers(drafter.target_layer_ids, target.n_layers):
        rows["warning"] = repeated
    return rows


def repeated_layers(layer_ids: Sequence[int], n_target: int) -> str:
    """What to say when layers are read more than once, which the spread over few layers comes to; else nothing."""
    if len(set(layer_ids)) == len(layer_ids):
        return ""
    fits = max(n for n in range(1, len(layer_ids)) if n == 1 or len(set(choose_layer_ids(n_target, n))) == n)
    return (
        f"target layers {list(layer_ids)} repeat: {n_target} layers are too few to spread {len(layer_ids)} features "
        f"over; --drafter.features {fits} reads no layer twice"
    )


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def millions(count: int) -> str:
    """A number of parameters, readable."""
    return f"{count / 1e6:.2f} M parameters"


def finish(
    config: TrainConfig, parts: Parts, run: RunDirectory, log: RunLog, guard: Callable[[int, int], None]
) -> None:
    """Takes the best checkpoint, measures it on every held-out prompt, exports it, reads the export back."""
    best = best_checkpoint(run)
    load_weights(parts, checkpoint.load(checkpoint.step_directory(run.checkpoints, best)).weights, str(run.path))
    drafter = beside_target(parts)
    prompts = counted(len(parts.prompts), "held-out prompt")
    log.line(f"measuring step {best} on {prompts}, against plain greedy decoding")
    try:
        measured = evaluate(parts.target, drafter, parts.prompts, config.eval.max_new_tokens, guard)
    except EvaluationAbandoned:
        return  # the checkpoint of the last step is there: --resume comes straight back here
    difference = export(config, parts, run)
    body = {"step": best, **asdict(measured), "export_max_abs_difference": difference}
    replace_text(run.evaluation, json.dumps(body, indent=1) + "\n")
    rows = [["best checkpoint", f"step {best}"], *evaluation_rows(measured)]
    rows += [["export", str(run.export)], ["re-loaded export", f"logits differ by at most {difference:.3g}"]]
    log.table("held-out result", [], rows)


def best_checkpoint(run: RunDirectory) -> int:
    """Step of the best checkpoint, as the newest one knows it."""
    newest = checkpoint.newest(run.checkpoints)
    state = checkpoint.read_state(newest)
    best: int | None = state["state"]["progress"]["best_step"]
    return state["step"] if best is None else best


def evaluation_rows(measured: Evaluation) -> list[list[str]]:
    """An evaluation as rows of a table."""
    rows = [
        ["tau", f"{measured.tau:.3f} tokens a block, the target's own one included"],
        ["acceptance by slot", " ".join(f"{share:.2f}" for share in measured.conditional_acceptance)],
        ["tokens a target forward", f"{measured.tokens_per_target_forward:.3f}"],
    ]
    if measured.speedup is not None:
        rows.append(["speed-up", f"{measured.speedup:.2f}x over plain greedy decoding, measured side by side"])
    if measured.identical is not None:
        prompts = counted(measured.prompts, "prompt")
        rows.append(["same as greedy", f"{measured.identical} of {prompts}, token for token"])
    if measured.speedup is not None and measured.speedup < 1:
        rows.append(["verdict", SLOWER])
    return rows


def export(config: TrainConfig, parts: Parts, run: RunDirectory) -> float:
    """Writes the drafter in z-lab's format, reads it back, and returns the largest difference of their logits."""
    from dflash.export.zlab import read_zlab, write_zlab

    if run.export.exists():
        shutil.rmtree(run.export)  # of this same run, from before it was resumed
    drafter, device = beside_target(parts), parts.target.device
    write_zlab(drafter, parts.target, run.export)
    again = read_zlab(run.export).to(device)
    again.bind_target(parts.target.embedding, parts.target.head)
    prompt = torch.tensor(parts.prompts[0], device=device)
    features = parts.target.features(prompt, drafter.target_layer_ids)
    block = torch.full((1, drafter.block_size), drafter.mask_token_id, device=device)
    block[0, 0] = prompt[-1]
    ours, theirs = (
        one.draft(one.new_cache(), features.hidden[None, :-1], block, len(prompt) - 1) for one in (drafter, again)
    )
    return float((ours - theirs).abs().max())
