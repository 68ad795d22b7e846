"""Rebuilds the embedded target from the standard library of the Python that runs it.

    python -m dflash.assets.build_target corpus BUILD     # the standard library -> corpus.jsonl
    python -m dflash.assets.build_target train BUILD      # minutes on a GPU, hours on a CPU
    python -m dflash.assets.build_target answers BUILD    # the prompts, answered by the trained target

BUILD then holds `target/` (model, tokenizer, template), `train.jsonl`, `heldout.jsonl` and `target/training.json`.
"""

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash.assets.corpus import KINDS, Example, examples

VOCABULARY = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
MAX_TOKENS = 384
PAD, END, MASK = 0, 2, 3
# ChatML; {% generation %} marks what the assistant said, which is where the loss mask comes from.
TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_corpus(build: Path) -> None:
    """Writes corpus.jsonl, every example with its module, kind and split, and corpus.json, where it came from."""
    rows = examples()
    with (build / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(asdict(row) | {"heldout": row.heldout}) + "\n")
    (build / "corpus.json").write_text(json.dumps({"python": platform.python_version(), "examples": len(rows)}) + "\n")
    print(f"{len(rows)} examples from Python {platform.python_version()}")


def read_corpus(build: Path) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples of corpus.jsonl."""
    split: tuple[list[Example], list[Example]] = ([], [])
    with (build / "corpus.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            split[row.pop("heldout")].append(Example(**row))
    return split


def build_tokenizer(texts: Iterator[str], directory: Path) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer and saves it with the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>",
        clean_up_tokenization_spaces=False, model_max_length=4096,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


def messages(example: Example, *, answered: bool = True) -> list[dict[str, str]]:
    """The example as chat messages."""
    answer = [{"role": "assistant", "content": example.answer}] if answered else []
    return [{"role": "user", "content": example.prompt}, *answer]


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[Example]) -> list[list[int]]:
    """Token ids of the conversations that fit MAX_TOKENS."""
    texts = tokenizer.apply_chat_template([messages(r) for r in rows], tokenize=False)
    return [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if len(ids) <= MAX_TOKENS]


def configuration() -> Qwen3Config:
    """Qwen3 with 3.2M parameters: 8 layers of width 192, tied embeddings."""
    return Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=448, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        pad_token_id=PAD, eos_token_id=END, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def batches(rows: list[list[int]], tokens: int, generator: random.Random) -> Iterator[torch.Tensor]:
    """Padded batches [b, t] of about `tokens` tokens: rows of like length together, batches in random order."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), generator.random()))
    groups: list[list[int]] = [[]]
    for i in order:
        if (len(groups[-1]) + 1) * len(rows[i]) > tokens:
            groups.append([])
        groups[-1].append(i)
    generator.shuffle(groups)
    for group in groups:
        width = max(len(rows[i]) for i in group)
        yield torch.tensor([rows[i] + [PAD] * (width - len(rows[i])) for i in group])


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Next-token cross entropy of [b, t]; padding (to the right of every row) carries none."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD, reduction=reduction
    )


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, rows: list[list[int]]) -> float:
    """exp of the mean cross entropy a token over `rows`, computed in float32."""
    total, count = 0.0, 0
    for ids in batches(rows, 32768, random.Random(0)):
        ids = ids.to(model.device)
        total += float(loss_of(model, ids, "sum"))
        count += int((ids[:, 1:] != PAD).sum())
    return math.exp(total / count)


def train(build: Path, epochs: int, seed: int, lr: float, batch_tokens: int) -> None:
    """Trains tokenizer and model; saves both, weights in bfloat16, and training.json with what was measured."""
    training, heldout = read_corpus(build)
    target = build / "target"
    tokenizer = build_tokenizer((text for e in training for text in (e.prompt, e.answer)), target)
    rows, heldout_rows = encode(tokenizer, training), encode(tokenizer, heldout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(configuration()).to(device)
    begin = time.perf_counter()
    fit(model, rows, epochs, lr, batch_tokens)
    seconds = time.perf_counter() - begin
    model = model.to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = [END]
    model.save_pretrained(target)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()), "training_conversations": len(rows),
        "training_tokens": sum(map(len, rows)), "epochs": epochs, "seed": seed, "lr": lr, "batch_tokens": batch_tokens,
        "seconds": round(seconds, 1), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__, "python_of_corpus": json.loads((build / "corpus.json").read_text())["python"],
        "heldout_conversations": len(heldout_rows),
        "heldout_perplexity": round(perplexity(model.float(), heldout_rows), 4),
        "train_perplexity": round(perplexity(model, rows[:4000]), 4),
    }  # fmt: skip
    (target / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))


def fit(model: Qwen3ForCausalLM, rows: list[list[int]], epochs: int, lr: float, batch_tokens: int) -> None:
    """AdamW with warm-up and cosine decay, bfloat16 autocast."""
    generator = random.Random(0)
    steps = epochs * sum(1 for _ in batches(rows, batch_tokens, random.Random(0)))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    step = 0
    for epoch in range(epochs):
        for ids in batches(rows, batch_tokens, generator):
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = loss_of(model, ids.to(model.device))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 200 == 0:
                print(f"epoch {epoch} step {step}/{steps} loss {loss.item():.4f}", flush=True)
            step += 1


def lr_factor(step: int, steps: int) -> float:
    """Warm-up over 200 steps, then a cosine down to 2 % of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return min(1.0, (step + 1) / 200) * (0.02 + 0.98 * cosine)


def write_answers(build: Path, per_kind: int, heldout_per_kind: int) -> None:
    """Writes train.jsonl and heldout.jsonl: prompts of both splits, answered greedily by the target in float32."""
    target = build / "target"
    tokenizer = AutoTokenizer.from_pretrained(target)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()
    for name, rows, count in zip(("train", "heldout"), read_corpus(build), (per_kind, heldout_per_kind)):
        chosen = [r for kind in KINDS for r in [e for e in rows if e.kind == kind][:count]]
        random.Random(0).shuffle(chosen)
        answers = answer(model, tokenizer, chosen)
        exact = sum(a == r.answer for a, r in zip(answers, chosen) if a)
        with (build / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for text, row in zip(answers, chosen):
                if text:
                    turn = [*messages(row, answered=False), {"role": "assistant", "content": text}]
                    out.write(json.dumps({"messages": turn, "module": row.module, "kind": row.kind}) + "\n")
        print(f"{name}: {len(chosen)} prompts, {exact} answers equal to the reference, {sum(map(bool, answers))} kept")


@torch.inference_mode()
def answer(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Example]) -> list[str]:
    """The target's greedy answers; empty for those that do not end within MAX_TOKENS or are empty."""
    tokenizer.padding_side = "left"
    answers: list[str] = []
    for begin in range(0, len(rows), 512):
        prompts = [messages(r, answered=False) for r in rows[begin : begin + 512]]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=256)[:, inputs["input_ids"].shape[1] :]
        for ids in out.tolist():
            answers.append(tokenizer.decode(ids[: ids.index(END)]) if END in ids else "")
    return answers


def main() -> None:
    """Command line of the three stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["corpus", "train", "answers"])
    parser.add_argument("build", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--per-kind", type=int, default=500, help="training prompts of each kind that are shipped")
    parser.add_argument("--heldout-per-kind", type=int, default=8)
    a = parser.parse_args()
    a.build.mkdir(parents=True, exist_ok=True)
    if a.stage == "corpus":
        write_corpus(a.build)
    elif a.stage == "train":
        train(a.build, a.epochs, a.seed, a.lr, a.batch_tokens)
    else:
        write_answers(a.build, a.per_kind, a.heldout_per_kind)


if __name__ == "__main__":
    main()
