"""The command line: one verb, its options, an exit code. Nothing heavy is imported before the options are right."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from dflash.errors import ConfigError, DflashError, OutputError

# characters of a file's name in a message
LONGEST_NAME = 200

USAGE = """\
usage: dflash VERB [OPTIONS]

Trains DFlash drafters for speculative decoding: one process, threads, no server.

verbs
  train      train a drafter, measure it by real speculative decoding, export it
  evaluate   acceptance length and speed of a drafter on held-out prompts
  generate   an answer by speculative decoding
  prepare    conversations -> tokenised store; preview of the loss mask; answers by the target
  export     a checkpoint in z-lab's or speculators' format
  bench      fixed-shape measurements (bench step, bench pipeline, bench strategies)
  doctor     checks before a training: torch, target, data, memory, time, disk
  watch      follows a run from another terminal
  plan       how many target and drafter devices to use, by simulation
  report     one HTML page of one or more runs

first steps
  dflash train                                       the embedded target, minutes on a CPU
  dflash train --preset paper --target.path DIR --data.train FILE.jsonl
  dflash train --resume --output runs/default        continue where it stopped
  dflash VERB --help                                 every option of a verb, with examples

  --help, --version, --completion bash|zsh|fish
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0, 2 for a user's mistake, 1 for a failed run, 128 + signal."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        return _dispatch(words)
    except DflashError as error:
        print(f"dflash: {_single_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # the reader (`| head`) has gone: keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # places that know better say so themselves; the rest (a name too long, a disk gone) is no traceback either
        print(f"dflash: {_single_line(_of_system(error))}", file=sys.stderr)
        return OutputError.exit_code
    except KeyboardInterrupt:
        print("dflash: interrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """A process started with `>&-` has no such stream at all, and Python gives none; per process, for good."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"dflash {_version()}")
        return 0
    if words[0] == "--completion":
        from dflash.completion import HELP, script

        print(script(words[1]) if len(words) > 1 else HELP, end="")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        from dflash.command_line import nearest

        raise ConfigError(f"a verb ({', '.join(VERBS)})", words[0], nearest(words[0], VERBS))
    return verb(words[1:])


def _of_system(error: OSError) -> OutputError:
    where = str(error.filename or "")
    where = where if len(where) <= LONGEST_NAME else f"{where[:LONGEST_NAME]}..."
    return OutputError("a file that can be used", error.strerror or repr(error), "check path and disk", where=where)


def _single_line(error: DflashError) -> str:
    return " ".join(str(error).split())


def _version() -> str:
    try:
        return version("dflash")
    except PackageNotFoundError:
        return "0 (not installed)"


def _train(words: list[str]) -> int:
    from dflash.command_line import training_config
    from dflash.paths import check_train

    config = training_config(words, description=TRAIN_HELP)
    check_train(config)
    from dflash.train import train

    return train(config)


def _evaluate(words: list[str]) -> int:
    from dflash.command_line import parse_required
    from dflash.config import EvaluateConfig
    from dflash.paths import check_trained

    config = parse_required(EvaluateConfig, words, prog="dflash evaluate", description=EVALUATE_HELP)
    check_trained(config.drafter, config.target)
    from dflash.verbs import evaluate

    return evaluate(config)


def _generate(words: list[str]) -> int:
    from dflash.command_line import parse_required
    from dflash.config import GenerateConfig
    from dflash.paths import check_trained

    config = parse_required(GenerateConfig, words, prog="dflash generate", description=GENERATE_HELP)
    check_trained(config.drafter, config.target)
    from dflash.verbs import generate

    return generate(config)


def _export(words: list[str]) -> int:
    from dflash.command_line import parse_required
    from dflash.config import ExportConfig
    from dflash.paths import check_trained

    config = parse_required(ExportConfig, words, prog="dflash export", description=EXPORT_HELP)
    check_trained(config.drafter, config.target)
    from dflash.verbs import export

    return export(config)


def _prepare(words: list[str]) -> int:
    from dflash.command_line import parse_required
    from dflash.data.options import PrepareOptions
    from dflash.paths import check_data, check_target

    options = parse_required(PrepareOptions, words, prog="dflash prepare", description=PREPARE_HELP)
    check_target(options.target)
    check_data(options.data)
    from rich.console import Console

    from dflash.data.prepare import run_prepare

    run_prepare(options, Console(highlight=False))
    return 0


def _bench(words: list[str]) -> int:
    from dflash.bench import BENCHES, USAGE

    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] not in BENCHES:
        from dflash.command_line import nearest

        raise ConfigError(f"a bench ({', '.join(BENCHES)})", words[0], nearest(words[0], BENCHES), where="dflash bench")
    return BENCHES[words[0]](words[1:])


def _doctor(words: list[str]) -> int:
    from dflash.doctor.verb import main

    return main(words)


def _watch(words: list[str]) -> int:
    from dflash.watch import main

    return main(words)


def _plan(words: list[str]) -> int:
    from dflash.pipeline.plan import main

    return main(words)


def _report(words: list[str]) -> int:
    from dflash.report.verb import main

    return main(words)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
    "prepare": _prepare,
    "export": _export,
    "bench": _bench,
    "doctor": _doctor,
    "watch": _watch,
    "plan": _plan,
    "report": _report,
}

TRAIN_HELP = """\
Train a drafter; the best checkpoint is picked by real speculative decoding and exported.

Values come from the preset, then --config FILE, then the command line. A file's keys are the options' names.

examples:
  dflash train --steps 100 --output runs/first
  dflash train --preset paper --target.path models/Qwen3-4B --data.train chats.jsonl --data.heldout held.jsonl
  dflash train --optim.lr 1e-3 --drafter.layers 2 --output runs/small --overwrite
  dflash train --resume --output runs/first
"""

EVALUATE_HELP = """\
Measure a drafter by speculative decoding: tau, acceptance per slot, tokens a target forward, speed-up.

examples:
  dflash evaluate --drafter runs/default
  dflash evaluate --drafter runs/default/export --target embedded --prompts held.jsonl --limit 20 --json
"""

GENERATE_HELP = """\
Answer a prompt by speculative decoding; with temperature 0 the text is the target's own greedy text.

example:
  dflash generate --drafter runs/default --prompt "List the parameters of: def f(a, b=1):"
"""

EXPORT_HELP = """\
Write a drafter in z-lab's or speculators' format.

examples:
  dflash export --drafter runs/default --output drafter-zlab
  dflash export --drafter runs/default --output drafter-spec --format speculators
"""

PREPARE_HELP = """\
Conversations into a tokenised store; the loss mask shown in colour, the answers said anew by the target.

Reads JSONL (plain or gzip), Parquet and saved datasets, in the shapes messages, conversations, prompt + completion,
and instruction + input + output. Without --output nothing is written.

examples:
  dflash prepare --data chats.jsonl --output store --target models/Qwen3-4B
  dflash prepare --data chats.jsonl --preview 3
  dflash prepare --data chats.jsonl --output store --target models/Qwen3-4B --regenerate
"""
