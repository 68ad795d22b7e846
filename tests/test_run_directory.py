"""The run directory: what --overwrite may delete and what it must not."""

from dataclasses import replace
from pathlib import Path

import pytest

from dflash import run_directory
from dflash.config import TrainConfig
from dflash.errors import CheckpointError, OutputError
from dflash.run_directory import RunDirectory
from tests.training import unchanged


def a_run(path: Path) -> TrainConfig:
    config = TrainConfig(output=path)
    run = run_directory.check(config)
    run_directory.create(run, config)
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    run.metrics.write_text("{}\n")
    return config


def test_a_new_directory_is_made_only_when_the_run_begins(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path / "a" / "b")
    run = run_directory.check(config)
    assert not (tmp_path / "a").exists()
    run_directory.create(run, config)
    assert run_directory.is_run(run.path)


def test_a_directory_with_files_needs_resume_or_overwrite(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run")
    with unchanged(tmp_path), pytest.raises(OutputError, match="add --resume to go on, --overwrite to start anew"):
        run_directory.check(config)


def test_overwrite_empties_a_run_and_starts_it_anew(tmp_path: Path) -> None:
    config = replace(a_run(tmp_path / "run"), overwrite=True, seed=7)
    run_directory.create(run_directory.check(config), config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
    assert '"seed": 7' in (tmp_path / "run" / "config.json").read_text()


def test_overwrite_leaves_alone_what_no_run_has_written(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with unchanged(tmp_path), pytest.raises(OutputError, match="a run to overwrite"):
        run_directory.check(TrainConfig(output=tmp_path / "thesis", overwrite=True))


def test_overwrite_stops_at_a_file_among_the_runs_own(tmp_path: Path) -> None:
    config = replace(a_run(tmp_path / "run"), overwrite=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with unchanged(tmp_path), pytest.raises(OutputError, match=r"got notes\.txt; move it elsewhere first"):
        run_directory.check(config)


def test_overwrite_does_not_follow_a_link_out_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("keep")
    config = replace(a_run(tmp_path / "run"), overwrite=True)
    (tmp_path / "run" / "features").symlink_to(tmp_path / "precious")
    run_directory.create(run_directory.check(config), config)
    assert (tmp_path / "precious" / "data").read_text() == "keep"
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(OutputError, match="a run to overwrite"):
        run_directory.check(replace(config, output=tmp_path / "link"))


def test_a_file_or_a_closed_directory_is_no_place_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="expected a directory, got a file"):
        run_directory.check(TrainConfig(output=tmp_path / "file" / "run"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere, so it is told otherwise
    with pytest.raises(OutputError, match="a writable directory, got no permission"):
        run_directory.check(TrainConfig(output=tmp_path / "run"))


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory.replace_text(tmp_path / "file", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with unchanged(tmp_path), pytest.raises(OutputError, match="got No space left on device; make room"):
        run_directory.replace_text(tmp_path / "file", "new")
    monkeypatch.undo()
    run_directory.replace_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_resuming_names_the_first_option_that_differs(tmp_path: Path) -> None:
    config = a_run(tmp_path / "run")
    other = replace(config, resume=True, optim=replace(config.optim, clip=9.0))
    with pytest.raises(CheckpointError, match=r"got optim\.clip = 9\.0 \(the run has 1\.0\)"):
        run_directory.check(other)
    assert run_directory.check(replace(config, resume=True)) == RunDirectory(tmp_path / "run")


def test_a_directory_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    refused = pytest.raises(OutputError, match="another process that writes there")
    with run_directory.alone(run), unchanged(tmp_path), refused, run_directory.alone(run):
        raise AssertionError("entered")
    with run_directory.alone(run):  # the control: free again
        assert run.path.is_dir()


def test_a_run_that_began_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path / "run")
    run = run_directory.check(config)
    run_directory.create(run, config)
    with unchanged(tmp_path), pytest.raises(OutputError, match="an empty output directory"):
        run_directory.create(run, config)


@pytest.mark.parametrize("made", [False, True])
def test_overwrite_takes_a_directory_that_is_new_or_empty(made: bool, tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path / "run", overwrite=True)
    if made:
        config.output.mkdir()
    run = run_directory.check(config)
    with run_directory.alone(run):
        run_directory.create(run, config)
    assert run_directory.is_run(run.path)
