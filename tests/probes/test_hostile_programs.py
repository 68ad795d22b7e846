"""Programs that end in odd ways, and odd places to print to: on a probe without torch, since all probes share this."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from children import REPOSITORY, run_child, split_report

STUB = Path(__file__).parent / "programs" / "stub_probe.py"

SPAWNS = """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]))
"""
ENDINGS = {
    "to its end": "print('done')",
    "in the middle of a line": "print('no line break', end='')",
    "by sys.exit": "import sys; print('x'); sys.exit(3)",
    "by sys.exit with a message": "import sys; sys.exit('why')",
    "by an exception": "print('x')\ndef f(): return 1 / 0\nf()",
    "by an exception that is no Exception": "class Odd(BaseException): pass\nraise Odd('odd')",
    "by a syntax error": "print('x'",
    "by os._exit": "import os; print('seen', flush=True); print('lost with the buffer'); os._exit(5)",
    "by os._exit in a thread": "import os, threading, time\nthreading.Thread(target=os._exit, args=(6,)).start()\n"
    "time.sleep(60)",
    "beside a daemon thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); print('x')",
    "before a thread of its own": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); print('main')",
    "with a thread that raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "with a forked child that runs on": "import os, sys\nchild = os.fork()\nif child: os.waitpid(child, 0)\n"
    "print('parent' if child else 'child')",
    "with a forked child that leaves": "import os\nchild = os.fork()\nif not child: os._exit(7)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    "after spawned processes": SPAWNS,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_so_prints_and_fails_as_it_does_alone_and_is_reported(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    alone = run_child(script)
    done = run_child(STUB, "--json", "--", script)
    printed, report = split_report(done.stdout)
    assert printed == alone.stdout
    assert without_ids(done.stderr) == without_ids(alone.stderr)
    assert report["outcome"]["exit_code"] == alone.returncode
    assert report["not a number"] == "nan"
    assert done.returncode == (1 if alone.returncode else 0)
    assert os.listdir(tmp_path) == ["script.py"], "nothing is written beside the program"


def without_ids(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d{6,}", "N", text)


def test_ctrl_c_ends_the_program_and_what_was_seen_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(60)")
    with started(script, "--json") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert split_report(out)[1]["outcome"] == {"exit_code": 130, "error": "KeyboardInterrupt: "}
    assert "run_target" not in err


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_reader_that_has_gone_changes_neither_exit_code_nor_stderr(tmp_path: Path, form: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ready', flush=True); sys.stdin.readline(); sys.exit(4)")
    with started(script, *form) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait(60) == 1
        assert process.stderr.read() == ""


def started(script: Path, *words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, str(STUB), *words, "--", str(script)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=heed_ctrl_c
    )


def heed_ctrl_c() -> None:
    """A shell's background job, and so what it starts, ignores SIGINT; a program in a terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("form", [("--json",), ()])
def test_without_a_stdout_the_exit_code_still_tells(tmp_path: Path, form: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, str(STUB), *form, "--", str(script)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def test_a_locale_without_the_characters_gets_escapes_and_the_program_its_own_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass")
    done = run_child(STUB, "--", script, **ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "title \\u2713" in done.stdout
    script.write_text("print('\\u2713')")
    alone, done = run_child(script, **ASCII), run_child(STUB, "--json", "--", script, **ASCII)
    assert "UnicodeEncodeError" in alone.stderr
    assert done.stderr == alone.stderr


@pytest.mark.parametrize("settings", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_of_forty_columns_shows_every_cell_whole_within_its_width(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass")
    text = shown_in_terminal([sys.executable, str(STUB), "--", str(script)], settings, columns=40)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    if settings["TERM"] != "dumb":  # rich takes a dumb terminal to be 80 columns wide, whatever the system says
        assert max(map(len, plain.splitlines())) <= 40
    letters = re.sub(r"[^\w\[\]/:]", "", plain)
    assert letters.count("w") >= 100
    assert "[red]" in letters, "names are shown as they are, not taken for markup"
    assert ":smile:" in letters
    if "NO_COLOR" in settings:
        assert not re.search(r"\x1b\[3\dm", text)


def shown_in_terminal(command: list[str], settings: dict[str, str], columns: int) -> str:
    """All that a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment = inherited | {"PYTHONPATH": str(REPOSITORY)} | settings
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        chunks = []
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # the other end has closed: Linux says EIO
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(ours)
    assert process.returncode == 0
    return b"".join(chunks).decode()
