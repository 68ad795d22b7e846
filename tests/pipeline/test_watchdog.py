"""The watchdog: quiet while something moves, otherwise stacks in a file, a stop, and the end of a stuck process."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dflash.errors import Hung
from dflash.pipeline.feed import Feed, FeedClosed
from dflash.pipeline.watchdog import Watchdog

ROOT = Path(__file__).parents[2]


def test_a_hang_is_classified_written_and_stopped(tmp_path: Path) -> None:
    feed = Feed[int](1)
    report = tmp_path / "stacks.txt"
    waiting = threading.Event()

    def wait_for_ever() -> None:
        waiting.set()
        with pytest.raises(FeedClosed):
            feed.take(3)

    thread = threading.Thread(target=wait_for_ever, name="drafter-0", daemon=True)
    thread.start()
    waiting.wait(5)
    with Watchdog(0.3, report, feed.close) as watchdog:
        watchdog.beat("step 7")
        with pytest.raises(FeedClosed) as closed:
            feed.take(0)
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(closed.value.__cause__, Hung)
    assert closed.value.__cause__.exit_code == 3
    text = report.read_text()
    assert "'step 7'" in text
    assert "drafter-0" in text
    assert "feed.py" in text


def test_nothing_is_done_while_something_moves(tmp_path: Path) -> None:
    stops: list[Hung] = []
    with Watchdog(0.4, tmp_path / "stacks.txt", stops.append) as watchdog:
        for number in range(20):
            time.sleep(0.05)
            watchdog.beat(f"step {number}")
    assert stops == []
    assert not (tmp_path / "stacks.txt").exists()


def test_zero_turns_it_off(tmp_path: Path) -> None:
    before = threading.active_count()
    with Watchdog(0.0, tmp_path / "stacks.txt", lambda hung: None):
        assert threading.active_count() == before


def test_a_main_thread_that_does_not_listen_is_ended(tmp_path: Path) -> None:
    ends: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        ends.append(code)
        ended.set()

    with Watchdog(0.1, tmp_path / "stacks.txt", lambda hung: None, grace_s=0.1, end=end):
        assert ended.wait(20)
    assert ends == [3]


STUCK = textwrap.dedent("""
    import sys, threading
    from pathlib import Path
    from dflash.pipeline.watchdog import Watchdog
    with Watchdog(0.2, Path(sys.argv[1]), lambda hung: None, grace_s=0.2):
        threading.Lock().acquire() and threading.Event().wait()
""")


def test_a_stuck_process_ends_with_code_3_and_says_why(tmp_path: Path) -> None:
    report = tmp_path / "stacks.txt"
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(report)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert "nothing moved for" in done.stderr
    assert report.exists()


def test_a_compile_that_nothing_blocks_is_given_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probes.stacks import StacksResult, Verdict

    looked: list[float] = []

    def compiling(dumps: object) -> StacksResult:
        looked.append(time.monotonic())
        return StacksResult(1, "test", "", (), None, (Verdict("long compile", "f compiles"),))

    monkeypatch.setattr("dflash.pipeline.watchdog.analyse", compiling)
    monkeypatch.setattr("dflash.pipeline.watchdog.COMPILE_WINDOWS", 2)
    monkeypatch.setattr("dflash.pipeline.watchdog.stack_sources.sample", lambda *a, **k: [])
    stopped = threading.Event()
    with Watchdog(0.1, tmp_path / "stacks.txt", lambda hung: stopped.set()):
        assert stopped.wait(20)
    assert len(looked) == 3
