"""probes.stacks on live child processes: each fault beside a program that has not got it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probes import stack_sources, stacks
from probes.run_target import find_target

ENGINE = """
import importlib, sys, threading, torch
importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list = list  # no trial compiles
importlib.import_module("torch._inductor.config").cpp_cache_precompile_headers = False
lazy = torch.compile(lambda x: x * 2)
x = torch.ones(3, requires_grad=True)
loss = lazy(x).sum()  # forward compiled; the backward is compiled when it is first needed

class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, depth):
        ctx.depth = depth
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            if ctx.depth:  # beyond 60 nested backwards the engine moves to a thread of its own, as for a GPU
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            elif sys.argv[1] == "compile":
                loss.backward()
        return g, None

def backend(gm, inputs):  # called under compile_lock
    Deep.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
    return gm.forward

def run():
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    print("finished", flush=True)
    threading.Event().wait(60)

print("ready", flush=True)
threading.Thread(target=run, name="T1").start()
"""

ABBA = """
import sys, threading, time
from torch._dynamo.convert_frame import compile_lock
gate_lock = threading.Lock()
both = threading.Barrier(2)

def one():
    with compile_lock:
        both.wait()
        with gate_lock:
            time.sleep(60)

def two():
    if sys.argv[1] == "cycle":
        with gate_lock:
            both.wait()
            with compile_lock:
                time.sleep(60)
    both.wait()
    with compile_lock:  # waits behind the owner, which waits for nobody
        pass

threading.Thread(target=one, name="one", daemon=True).start()
threading.Thread(target=two, name="two", daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""

QUEUE = """
import queue, sys, threading, time
q = queue.Queue()

def consume():
    while True:
        q.get()

def produce():
    while True:
        q.put(1)
        time.sleep(0.05)

threads = [threading.Thread(target=consume, name="consumer", daemon=True)]
if sys.argv[1] == "served":
    threads.append(threading.Thread(target=produce, name="producer", daemon=True))
for thread in threads:
    thread.start()
print("ready", flush=True)
threads[0].join()
"""

COMPILING = """
import threading, time, torch
def backend(gm, inputs):
    print("ready", flush=True)
    time.sleep(60)
    return gm.forward
threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)), name="T1").start()
"""


@contextmanager
def running(tmp_path: Path, source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A child that has printed "ready"."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(source))
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
        yield child
    finally:
        child.kill()
        child.wait()


def kinds(result: stacks.StacksResult) -> list[str]:
    return [verdict.kind for verdict in result.verdicts]


def wait_until(condition: object, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, "the program never got there"
        time.sleep(0.2)


def test_a_compile_that_waits_for_an_engine_thread_that_waits_for_its_lock_is_a_deadlock(tmp_path: Path) -> None:
    with running(tmp_path, ENGINE, "compile") as child:
        wait_until(lambda: any(r.waits == "compile_lock" for r in stacks.inspect(child.pid, window_s=0.1).threads))
        result = stacks.inspect(child.pid, window_s=0.5)
    assert kinds(result) == ["engine deadlock"]
    assert result.lock_owner is not None
    assert result.lock_owner.startswith("T1")
    assert result.finding


def test_the_same_program_without_the_lazy_backward_is_not_called_a_deadlock(tmp_path: Path) -> None:
    with running(tmp_path, ENGINE, "plain") as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "finished"
        result = stacks.inspect(child.pid, window_s=0.2)
    assert kinds(result) == ["none"]
    assert result.lock_owner is None


def test_two_threads_taking_two_locks_in_opposite_order_are_a_cycle(tmp_path: Path) -> None:
    with running(tmp_path, ABBA, "cycle") as child:
        result = stacks.inspect(child.pid, window_s=0.2)
    assert kinds(result) == ["lock cycle"]
    text = result.verdicts[0].text
    assert "holds compile_lock and waits for gate_lock" in text
    assert "holds gate_lock and waits for compile_lock" in text


def test_a_thread_waiting_behind_a_lock_owner_who_waits_for_nobody_is_no_cycle(tmp_path: Path) -> None:
    with running(tmp_path, ABBA, "queue up") as child:
        result = stacks.inspect(child.pid, window_s=0.2)
    assert kinds(result) == ["none"]
    assert {r.thread.name: r.waits for r in result.threads}["two"] == "compile_lock"
    assert result.lock_owner is not None
    assert result.lock_owner.startswith("one")


@pytest.mark.parametrize(("mode", "kind"), [("starved", "stuck queue"), ("served", "none")])
def test_a_queue_is_stuck_only_when_no_thread_is_left_to_serve_it(tmp_path: Path, mode: str, kind: str) -> None:
    with running(tmp_path, QUEUE, mode) as child:
        result = stacks.inspect(child.pid, window_s=0.4)
    assert kinds(result) == [kind]


def test_a_thread_compiling_through_the_whole_window_is_a_long_compile_not_a_deadlock(tmp_path: Path) -> None:
    with running(tmp_path, COMPILING) as child:
        result = stacks.inspect(child.pid, window_s=0.2)
    assert kinds(result) == ["long compile"]
    reading = next(r for r in result.threads if r.thread.name == "T1")
    assert reading.activity == "compiling: dynamo"
    assert "compile_lock" in reading.holds


def test_the_command_line_prints_json_and_exits_1_on_a_hung_process(tmp_path: Path) -> None:
    with running(tmp_path, ABBA, "cycle") as child:
        done = probe("--pid", str(child.pid), "--window", "0.2s", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdicts"][0]["kind"] == "lock cycle"


def test_a_script_that_hangs_is_judged_and_ended_and_one_that_ends_is_clean(tmp_path: Path) -> None:
    hung, quick = tmp_path / "hung.py", tmp_path / "quick.py"
    hung.write_text(QUEUE)
    quick.write_text("print('fine')")
    done = probe("--after", "1s", "--window", "0.2s", "--", str(hung), "starved")
    assert (done.returncode, "stuck queue" in done.stdout) == (1, True)
    done = probe("--after", "20s", "--", str(quick))
    assert (done.returncode, "fine" in done.stdout) == (0, True)


LATE = (
    "import sys, time; print('begun', flush=True); sys.stdin.readline(); print('through'); sys.exit(int(sys.argv[1]))"
)


def test_a_script_that_hangs_nowhere_is_reported_while_it_runs_and_goes_on_to_its_end(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = [sys.executable, "-m", "probes.stacks", "--after", "1s", "--window", "0.2s", "--", str(script), "3"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        said = [parent.stdout.readline()]
        while not said[-1].startswith("verdict: none"):  # the script cannot end before it reads its line
            said.append(parent.stdout.readline())
            assert said[-1], said
        rest, _ = parent.communicate("go\n", timeout=60)
    assert said[0] == "begun\n"
    assert rest == "through\n"
    assert parent.returncode == 1, "a program that fails is no clean end"


def test_faulthandler_stands_in_when_attaching_is_not_allowed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, *, native: bool = False) -> stack_sources.Dump:
        raise stack_sources.PermissionRefused("no")

    monkeypatch.setattr(stack_sources, "py_spy_dump", refuse)
    script = tmp_path / "program.py"
    script.write_text(QUEUE)
    with stack_sources.started_script(find_target([str(script), "starved"])) as child:
        assert child.still_running_after(1.0)
        result = stacks.analyse(stack_sources.sample(child.dump, window_s=0.2))
    assert result.source == "faulthandler"
    assert "not allowed" in result.note
    assert kinds(result) == ["stuck queue"]


def test_the_context_manager_judges_its_own_process_and_names_the_exact_lock_owner() -> None:
    from probes.torch_internals import compile_lock

    release = threading.Event()

    def hold() -> None:
        with compile_lock():
            release.wait(20)

    holder = threading.Thread(target=hold, name="holder")
    watch = stacks.watch(0.1, window_s=0.2)
    with watch:
        holder.start()
        time.sleep(0.8)
        release.set()
    holder.join()
    assert watch.result is not None
    assert watch.result.source == "sys._current_frames"
    assert watch.result.lock_owner is not None
    assert watch.result.lock_owner.startswith("holder")


def test_a_block_that_ends_in_time_has_no_result_and_entering_twice_raises() -> None:
    watch = stacks.watch(30)
    with watch, pytest.raises(RuntimeError, match="entered twice"):
        watch.__enter__()
    assert watch.result is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pid", "99999999"), "does not exist"),
        ((), "expected --pid N"),
        (("--after", "1s", "--", "missing.py"), "missing.py"),
        (("--pid", "1", "--after", "1s", "--", "x.py"), "expected --pid N"),
        (("--pid", "1", "--after", "1s"), "expected --pid N"),
        (("--after", "soon", "--", "x.py"), "expected a time such as 30s"),
    ],
)
def test_bad_use_is_one_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    done = probe(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_pid_that_is_not_python_is_one_line_and_exit_2() -> None:
    other = subprocess.Popen(["sleep", "30"])
    try:
        done = probe("--pid", str(other.pid))
    finally:
        other.kill()
        other.wait()
    assert (done.returncode, "expected a Python process" in done.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to be refused")
def test_a_refused_attach_is_one_line_and_exit_2() -> None:
    code = (
        "import os, sys; from probes import stacks; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "stacks.run_command(stacks.main, ['--pid', sys.argv[1]])"
    )
    command = [sys.executable, "-c", code, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "refused" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "probes.stacks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
