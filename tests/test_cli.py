"""The command line: fast help, one line for every mistake, exit codes, nothing written on a mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash import run_directory
from dflash.cli import VERBS, main
from dflash.run_directory import RunDirectory
from tests.conftest import TargetMaker, build_tokenizer
from tests.training import small_config, unchanged, write_chats

ROOT = Path(__file__).parents[1]


def small_words(tmp_path: Path, target: Path) -> list[str]:
    """The command line of `small_config`."""
    config = small_config(tmp_path, target)
    return [
        *("train", "--output", str(config.output), "--steps", "8", "--save-every", "3", "--device", "cpu"),
        *("--target.path", str(target), "--data.train", config.data.train, "--data.heldout", config.data.heldout),
        *("--data.row-tokens", "128", "--drafter.layers", "1", "--drafter.block-size", "4"),
        *("--drafter.max-anchors", "8", "--eval.every", "0", "--eval.prompts", "1", "--eval.max-new-tokens", "8"),
    ]


def test_help_fits_a_screen_and_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    assert max(len(line) for line in text.splitlines()) <= 100
    assert all(f"  {verb} " in text for verb in VERBS)


def test_no_verb_prints_the_usage_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: dflash VERB" in capsys.readouterr().out


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dflash 0")


def test_help_and_mistakes_do_not_load_torch() -> None:
    code = (
        "import sys; from dflash.cli import main\n"
        "missing = [['train', '--target.path', 'a/b'], ['train', '--data.train', 'zz'],\n"
        " ['train', '--output', 'README.md'], ['train', '--output', 'tests'],\n"
        " ['generate', '--drafter', 'zz', '--prompt', 'x'],\n"
        " ['prepare', '--data', 'zz']]\n"
        "for words in (['--help'], ['--version'], ['bench', '--help'], ['train', '--stepss', '3'], *missing):\n"
        "    main(words)\n"
        "print('torch' in sys.modules); import dflash.step; print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=120, text=True)
    assert child.stdout.split()[-2:] == ["False", "True"]  # the second is the control


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "bench"])
def test_the_help_of_a_verb_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert text.count(f"dflash {verb} ") >= 2  # the usage line and an example


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["trian"], ["a verb (train, evaluate", "did you mean train?"]),
        (["train", "--stepps", "3"], ["--stepps", "did you mean --steps?"]),
        (["evaluate", "--draftr", "x", "--drafter", "y"], ["--draftr", "did you mean --drafter?"]),
        (["evaluate"], ["the required --drafter"]),
        (["generate", "--drafter", "x"], ["the required --prompt"]),
        (["export", "--drafter", "x"], ["the required --output"]),
        (["bench", "stpe"], ["did you mean step?"]),
        (["train", "--config", "nowhere.toml"], ["nowhere.toml"]),
        (["evaluate", "--drafter", "nowhere", "--target", "embedded"], ["nowhere: expected a run", "does not exist"]),
        (["generate", "--drafter", "runs/zz", "--prompt", "x"], ["runs/zz: ", "got a path that does not exist"]),
        (["evaluate", "--drafter", ".", "--target", "Qwen/Q3"], ["hf download Qwen/Q3 --local-dir DIR"]),
        (["prepare", "--input", "x"], ["unknown option --input; did you mean --data?"]),
        (["prepare", "--dat", "x"], ["got --dat; did you mean --data?"]),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    words: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dflash: ")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


Spoil = Callable[[Path, Path, TargetMaker], list[str]]


def bad_row(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    with (tmp / "chats.jsonl").open("a") as stream:
        stream.write('{"prompt": "x", "completion": \n')
    return []


def empty_file(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    (tmp / "chats.jsonl").write_text("")
    return []


def no_assistant(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    (tmp / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    return []


def overlong(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    return ["--data.overlong", "error", "--data.row-tokens", "16"]


def no_generation_blocks(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    tokenizer = build_tokenizer()
    plain = tokenizer.get_chat_template()
    tokenizer.chat_template = plain.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    copy = tmp / "target"
    copy.mkdir()
    for file in target.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(copy)
    return ["--target.path", str(copy)]


def short_answers(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    write_chats(tmp / "chats.jsonl", 4, 2)
    return ["--drafter.block-size", "64"]


def answers_without_words(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    (tmp / "chats.jsonl").write_text(json.dumps({"prompt": "hi", "completion": ""}) + "\n")
    return []


def three_layers(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    return ["--target.path", str(make("qwen3", 3))]


def occupied(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    (tmp / "run").mkdir()
    (tmp / "run" / "notes.txt").write_text("mine")
    return []


def options(*words: str) -> Spoil:
    return lambda tmp, target, make: list(words)


def overwrite_notes(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    return [*occupied(tmp, target, make), "--overwrite"]


def other_vocabulary(tmp: Path, target: Path, make: TargetMaker) -> list[str]:
    words = ["--data", str(tmp / "chats.jsonl"), "--output", str(tmp / "store"), "--target", str(target)]
    assert main(["prepare", *words, "--row-tokens", "128"]) == 0
    meta = json.loads((tmp / "store" / "meta.json").read_text())
    (tmp / "store" / "meta.json").write_text(json.dumps({**meta, "vocab_sha256": "0" * 64}))
    return ["--data.train", str(tmp / "store")]


@pytest.mark.parametrize(
    ("spoil", "fragments"),
    [
        (bad_row, ["chats.jsonl:25"]),
        (empty_file, ["chats.jsonl"]),
        (no_assistant, ["chats.jsonl:1", "assistant"]),
        (overlong, ["chats.jsonl:1", "at most 16 tokens"]),
        (short_answers, ["chats.jsonl", "64 tokens are left for a block", "none in 4 documents"]),
        (answers_without_words, ["chats.jsonl", "got 1 unsupervised"]),
        (no_generation_blocks, ["generation"]),
        (three_layers, ["at least 4 layers", "got 3"]),
        (other_vocabulary, ["vocabulary"]),
        (occupied, ["an empty output directory", "--resume", "--overwrite"]),
        (overwrite_notes, ["a run to overwrite"]),
        (options("--resume"), ["a run to resume"]),
        (options("--drafter.layer-ids", "1", "9"), ["layer ids in 0..5", "got 9"]),
        (options("--drafter.mask-token-id", "384"), ["in 0..383", "got 384"]),
        (options("--drafter.mask-token-id", "0"), ["pad token"]),
        (options("--target.path", "nowhere"), ["nowhere", "no such directory"]),
        (options("--data.train", "nowhere.jsonl"), ["nowhere.jsonl"]),
        (options("--data.heldout", "nowhere.jsonl"), ["nowhere.jsonl"]),
        (options("--data.train", "n" * 5000), ["nnn...", "File name too long"]),
        (options("--attn-kernel", "flex"), ["flex"]),
        (options("--device", "cuda:99"), ["CUDA devices"]),
        (options("--data.features", "offline"), ["store"]),
    ],
)
def test_bad_input_to_train_is_one_line_and_writes_nothing(
    spoil: Spoil,
    fragments: list[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    make_target_dir: TargetMaker,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = small_words(tmp_path, tiny_target_dir)
    words += spoil(tmp_path, tiny_target_dir, make_target_dir)
    capsys.readouterr()
    with unchanged(tmp_path):
        assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("dflash: ")
    assert err.count("\n") == 1, err
    for fragment in fragments:
        assert fragment in err


def test_every_verb_works_on_one_small_run(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target, held = str(tmp_path / "run"), str(tiny_target_dir), str(tmp_path / "held.jsonl")
    assert main(small_words(tmp_path, tiny_target_dir)) == 0
    capsys.readouterr()
    assert main(["evaluate", "--drafter", run, "--max-new-tokens", "6", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["identical"] == measured["prompts"] == 2
    assert main(["export", "--drafter", run, "--output", str(tmp_path / "spec"), "--format", "speculators"]) == 0
    assert "differ by at most 0" in capsys.readouterr().out
    for drafter in (f"{run}/export", str(tmp_path / "spec"), f"{run}/checkpoints/step-00000008"):
        words = ["--drafter", drafter, "--target", target, "--prompts", held, "--max-new-tokens", "6", "--json"]
        assert main(["evaluate", *words]) == 0
        assert json.loads(capsys.readouterr().out)["tau"] == measured["tau"]
    assert main(["generate", "--drafter", run, "--prompt", "hi", "--max-new-tokens", "4"]) == 0
    assert "tokens, " in capsys.readouterr().out
    assert main(["evaluate", "--drafter", f"{run}/export"]) == 2
    assert "give --target DIR" in capsys.readouterr().err


def test_a_resumed_run_needs_no_options_and_refuses_others(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(small_words(tmp_path, tiny_target_dir)) == 0
    assert main(["train", "--resume", "--output", str(run)]) == 0
    capsys.readouterr()
    with unchanged(tmp_path):
        assert main(["train", "--resume", "--output", str(run), "--optim.lr", "0.5"]) == 2
    assert "got optim.lr = 0.5 (the run has" in capsys.readouterr().err
    longer = ["--steps", "20", "--seed", "3"]
    with unchanged(tmp_path):
        assert main(["train", "--resume", "--output", str(run), *longer]) == 2
    err = capsys.readouterr().err
    for fragment in ("steps = 20 (the run has 8), seed = 3 (the run has 0)", "to train longer start a new run"):
        assert fragment in err
    assert main([*small_words(tmp_path, tiny_target_dir), "--overwrite", "--steps", "2"]) == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    # begun with --overwrite, which must not come back with the run's own options
    assert main(["train", "--resume", "--output", str(run)]) == 0


def test_ctrl_c_in_a_real_process_saves_and_exits_130(tmp_path: Path, tiny_target_dir: Path) -> None:
    words = [*small_words(tmp_path, tiny_target_dir), "--steps", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step-00000003").exists():
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        err = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130
    assert err.count("\n") == 1
    assert f"go on with: dflash train --resume --output {tmp_path / 'run'}" in err


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "</dev/null >/dev/full"])
def test_a_process_without_streams_still_says_by_its_code_what_happened(closed: str, tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m dflash train --output {tmp_path / 'run'} --steps 0 {closed}"
    child = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert child.returncode == 2
    assert "Traceback" not in child.stderr


def test_two_runs_at_once_into_one_output_are_refused(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small_words(tmp_path, tiny_target_dir)
    assert main(words) == 0
    for more in (["--resume"], ["--overwrite"]):
        with run_directory.alone(RunDirectory(tmp_path / "run")), unchanged(tmp_path):
            assert main([*words, *more]) == 2
        assert "another process that writes there" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0  # the control: nobody else is there


def test_the_package_lists_its_public_names() -> None:
    code = "import dflash, sys; print({*dflash.__all__} <= {*dir(dflash)}, 'torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60, text=True)
    assert child.stdout.split() == ["True", "False"]


def test_chats_of_the_tests_are_read_whole(tmp_path: Path) -> None:
    assert len(write_chats(tmp_path / "x.jsonl", 5).read_text().splitlines()) == 5
