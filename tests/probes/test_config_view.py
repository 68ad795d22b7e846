"""config_view shows settings thread by thread and finds those that never reached a worker."""

import threading
from pathlib import Path

import pytest
from children import split_report

from probes import torch_internals as ti
from probes.config_view import watch_config

PROGRAM = Path(__file__).parent / "programs" / "setting_in_main.py"
SETTING = "torch._dynamo.config.recompile_limit"


def _viewed(child, mode):
    done = child("-m", "probes.config_view", "--json", "--", PROGRAM, mode)
    assert done.stdout, done.stderr
    return done.returncode, *split_report(done.stdout)


def test_a_setting_made_in_main_only_never_reaches_the_worker(child):
    code, printed, report = _viewed(child, "in-main")
    assert printed == child(PROGRAM, "in-main").stdout
    if not ti.config_is_per_context():
        assert (code, report["unreached"]) == (0, [])
        return
    assert code == 1
    assert report["unreached"] == [{"setting": SETTING, "in_main": "77", "thread": "worker", "in_thread": "default"}]


def test_a_setting_made_in_both_threads_is_no_finding(child):
    code, printed, report = _viewed(child, "in-worker")
    assert (code, printed, report["unreached"]) == (0, "worker sees 77\n", [])
    assert report["workers"][0]["settings"] == {SETTING: "77"}


def test_threads_start_as_before_after_an_exception_and_two_watches_are_refused():
    start = threading.Thread.start
    with pytest.raises(RuntimeError, match="leave it first"), watch_config(), watch_config():
        pass
    assert threading.Thread.start is start
    with pytest.raises(KeyError), watch_config():
        raise KeyError
    assert threading.Thread.start is start


def test_a_thread_whose_body_raises_is_looked_at_too():
    class Failing(threading.Thread):
        def run(self):
            raise SystemExit

    with watch_config() as watch:
        thread = Failing(name="failing")
        thread.start()
        thread.join()
    assert [view.thread for view in watch.report().workers] == ["failing"]
