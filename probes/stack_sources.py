"""Where stacks come from: py-spy for any process, faulthandler for a child, sys._current_frames for ourselves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from probes.command_line import UsageProblem
from probes.run_target import Target


class StackError(UsageProblem):
    """A process whose stacks cannot be read; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class Frame:
    """One frame: function name, file, current line."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Thread:
    """One thread's stack, innermost frame first; native frames are kept apart because they move while it waits."""

    ident: int
    name: str | None
    frames: tuple[Frame, ...]
    native: tuple[Frame, ...] = ()

    @property
    def label(self) -> str:
        """The thread's name with its id, or the id alone."""
        return f"{self.name} ({self.ident})" if self.name else str(self.ident)


@dataclass(frozen=True)
class Dump:
    """All threads of one process at one moment. `lock_owner` is set only where the lock itself could be asked."""

    pid: int
    source: str
    threads: tuple[Thread, ...]
    note: str = ""
    lock_owner: str | None = None


def seconds(text: str) -> float:
    """Parse "30", "30s" or "1.5m" to seconds, for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30s, got {text!r}")
    return float(match[1]) * (60.0 if match[2] == "m" else 1.0)


def sample(take: Callable[[], Dump], *, window_s: float, pause: Callable[[float], object] = time.sleep) -> list[Dump]:
    """Three dumps spread over `window_s` seconds: one dump cannot tell a wait from a moment."""
    dumps = [take()]
    for _ in range(2):
        pause(window_s / 2)
        dumps.append(take())
    return dumps


def py_spy_dump(pid: int, *, native: bool = False) -> Dump:
    """Read another process with py-spy; raises StackError for a pid that is gone, foreign or not Python."""
    if not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
        raise StackError(f"expected a running process, got pid {pid}, which does not exist: check the number")
    command = [_py_spy(), "dump", "--json", "--pid", str(pid), *(["--native"] if native else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _refusal(pid, done.stderr)
    return Dump(pid, "py-spy", tuple(_py_spy_thread(pid, thread) for thread in json.loads(done.stdout)))


def _py_spy() -> str:
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise StackError("expected the py-spy program beside this Python or on PATH, found neither: pip install py-spy")
    return found


def _refusal(pid: int, message: str) -> StackError:
    if re.search(r"permission denied|not permitted|EPERM", message, re.IGNORECASE):
        return PermissionRefused(
            f"expected leave to attach to pid {pid}, the system refused: run as that user with CAP_SYS_PTRACE, "
            "or start the program with `python -m probes.stacks --after 30 -- script.py`"
        )
    if "python version" in message.lower() or "python" in message.lower():
        return StackError(f"expected a Python process, pid {pid} is not one: give the pid of the interpreter")
    why = next(iter(message.splitlines()), "no reason given")
    return StackError(f"expected a readable process, py-spy could not read pid {pid}: {why}")


class PermissionRefused(StackError):
    """The system does not let this user attach to that process."""


def _py_spy_thread(pid: int, raw: dict[str, object]) -> Thread:
    entries = raw["frames"]
    assert isinstance(entries, list)
    python: list[Frame] = []
    native: list[Frame] = []
    for entry in entries:
        frame = Frame(str(entry["name"]), str(entry["filename"]), int(entry["line"]))
        (python if frame.file.endswith(".py") or frame.file.startswith("<") else native).append(frame)
    ident = int(str(raw.get("os_thread_id") or raw["thread_id"]))
    name = raw.get("thread_name") or _system_name(pid, ident)
    return Thread(ident, str(name) if name else None, tuple(python), tuple(native))


def _system_name(pid: int, ident: int) -> str | None:
    """The operating system's name of a thread that Python did not start, such as autograd's pt_autograd_0."""
    try:
        return Path(f"/proc/{pid}/task/{ident}/comm").read_text().strip()
    except OSError:
        return None


def own_dump() -> Dump:
    """This process through sys._current_frames, with the exact owner of compile_lock; leaves out the calling thread."""
    from probes import torch_internals  # here, so that reading another process need not import torch

    known = {thread.ident: thread for thread in threading.enumerate()}
    threads: list[Thread] = []
    for ident, top in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        frames, frame = [], top
        while frame is not None:
            frames.append(Frame(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        thread = known.get(ident)
        native_id = thread.native_id if thread is not None else None
        threads.append(Thread(native_id or ident, thread.name if thread else None, tuple(frames)))
    owner = torch_internals.compile_lock_state().owner
    named = known.get(owner) if owner is not None else None
    return Dump(os.getpid(), "sys._current_frames", tuple(threads), lock_owner=_owner_label(owner, named))


def _owner_label(owner: int | None, thread: threading.Thread | None) -> str | None:
    if owner is None:
        return None
    return f"{thread.name} ({thread.native_id})" if thread is not None else str(owner)


# The child registers a signal handler that writes all stacks to a file, for systems that forbid attaching.
_CHILD = (
    "import faulthandler, os, runpy, signal, sys; "
    "faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], 'a'), all_threads=True); "
    "is_module = sys.argv[2] == '-m'; "
    "sys.argv = sys.argv[3 if is_module else 2:]; "
    "sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(sys.argv[0])); "
    "(runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True) if is_module "
    "else runpy.run_path(sys.argv[0], run_name='__main__'))"
)
INTERRUPT_GRACE_S = 5.0


class ChildScript:
    """A script started by `started_script`."""

    def __init__(self, process: subprocess.Popen[bytes], dump_file: Path) -> None:
        self._process = process
        self._dump_file = dump_file

    def still_running_after(self, after_s: float) -> bool:
        """Wait `after_s` seconds at most; False when the script ended, whatever its exit status."""
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    def wait(self) -> int:
        """Let the script end by itself."""
        return self._process.wait()

    def dump(self, *, native: bool = False) -> Dump:
        """Its stacks by py-spy, or by faulthandler (said in `note`) where attaching is not allowed."""
        try:
            return py_spy_dump(self._process.pid, native=native)
        except PermissionRefused:
            return self._faulthandler_dump()

    def _faulthandler_dump(self) -> Dump:
        before = self._dump_file.stat().st_size
        self._process.send_signal(signal.SIGUSR2)
        text, deadline = "", time.monotonic() + 5
        while time.monotonic() < deadline:
            grown = self._dump_file.read_bytes()[before:].decode(errors="replace")
            if grown and grown == text:
                break
            text = grown
            time.sleep(0.1)
        if not text:
            raise StackError("expected stacks from faulthandler within 5 s, got none: the script replaced SIGUSR2")
        note = "attaching with py-spy is not allowed here; faulthandler knows no thread names"
        return Dump(self._process.pid, "faulthandler", parse_faulthandler(text), note)


@contextlib.contextmanager
def started_script(target: Target) -> Iterator[ChildScript]:
    """Run a program as a child; on leaving, a child that is still alive is ended.

    Ctrl-C reaches the child as well, which gets 5 s to end in its own way.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump_file = Path(folder) / "stacks.txt"
        dump_file.touch()
        words = [*(["-m"] if target.is_module else []), target.name, *target.args]
        process = subprocess.Popen([sys.executable, "-c", _CHILD, str(dump_file), *words])
        try:
            yield ChildScript(process, dump_file)
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_GRACE_S)
            raise
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Threads of a faulthandler dump; names appear only from Python 3.14 on."""
    threads: list[Thread] = []
    for block in re.split(r"\n(?=(?:Current )?[Tt]hread 0x)", text.strip()):
        head = re.match(r"(?:Current )?[Tt]hread (0x[0-9a-f]+)(?: \[([^\]]*)\])?", block)
        if head is None:
            continue
        frames = re.findall(r'File "([^"]+)", line (\d+) in (.+)', block)
        stack = tuple(Frame(function, file, int(line)) for file, line, function in frames)
        threads.append(Thread(int(head[1], 16), head[2], stack))
    return tuple(threads)
