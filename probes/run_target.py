"""How a probe runs somebody's program in its own process: `-- script.py args` or `-- -m package args`.

The program sees what `python script.py args` would show it: `__name__ == "__main__"`, `sys.argv`, and its own folder
first on `sys.path` (the probe's entries stay behind it). Threads it leaves running are waited for, as Python does.
Ctrl-C and `os._exit` end the program, not the report. Processes that the program starts are not watched.
"""

from __future__ import annotations

import concurrent.futures.thread
import importlib
import importlib.util
import inspect
import os
import pkgutil
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from probes.command_line import INTERRUPTED, UsageProblem, console, flush_stdout, nearest


@dataclass(frozen=True)
class Target:
    """A program to run: a script's path or a module's name, and its arguments."""

    name: str
    is_module: bool
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((*(("-m",) if self.is_module else ()), self.name, *self.args))


@dataclass(frozen=True)
class Outcome:
    """How the program ended: the exit code Python would have given, and the exception's last line, "" if none."""

    exit_code: int
    error: str

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


def show_failure(outcome: Outcome) -> None:
    """Print how a program that failed ended; nothing for one that did not."""
    if outcome.failed:
        said = f"the program itself ended with exit code {outcome.exit_code}: {outcome.error}"
        console().print(said, soft_wrap=True)


def find_target(words: Sequence[str] | None) -> Target:
    """The program named after `--`; UsageProblem when there is none or it does not exist, with the nearest name."""
    if not words:
        raise UsageProblem("expected a program, got none; add -- script.py args or -- -m package args")
    if words[0] == "-m":
        if len(words) == 1:
            raise UsageProblem("expected a module name after -m, got none")
        return Target(_runnable_module(words[1]), is_module=True, args=tuple(words[2:]))
    return Target(_existing_script(words[0]), is_module=False, args=tuple(words[1:]))


def _existing_script(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        raise UsageProblem(f"expected a script, got the folder {name}; name a .py file in it")
    if path.exists():
        if not os.access(path, os.R_OK):
            raise UsageProblem(f"expected a script, got {name}, which this user may not read")
        return name
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UsageProblem(f"expected a script, got {name}, which does not exist{nearest(path.name, siblings)}")


def _runnable_module(name: str) -> str:
    spec = _existing_module(name)
    if spec.submodule_search_locations is not None and _spec(f"{name}.__main__") is None:
        raise UsageProblem(f"expected a module to run, got the package {name}, which has no __main__")
    return name


def _existing_module(name: str) -> ModuleSpec:
    parent, _, _ = name.rpartition(".")
    if parent and _spec(parent) is None:
        raise UsageProblem(
            f"expected a module, got {name}: there is no {parent}{nearest(parent, _known_modules(parent))}"
        )
    found = _spec(name)
    if found is None:
        raise UsageProblem(f"expected a module, got {name}, which cannot be found{nearest(name, _known_modules(name))}")
    return found


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None
    except Exception as error:
        raise _broken_module(name, error) from error


def _broken_module(name: str, error: Exception) -> UsageProblem:
    return UsageProblem(f"expected a module that can be imported, got {name}: {type(error).__name__}: {error}")


def _known_modules(name: str) -> list[str]:
    """Names near a misspelt one: siblings in its package, or top-level modules of the path's folders."""
    parent, _, _ = name.rpartition(".")
    if parent and _spec(parent) is not None:
        package = importlib.import_module(parent)
        return [f"{parent}.{entry.name}" for entry in pkgutil.iter_modules(getattr(package, "__path__", []))]
    return [entry.name for entry in pkgutil.iter_modules()]


@contextmanager
def program(target: Target, if_it_leaves: Callable[[Outcome], int] | None = None) -> Iterator[None]:
    """Give the process the program's `sys.argv` and `sys.path`, for the process, restored on leaving.

    `if_it_leaves` reports when the program ends the process by `os._exit`, and returns the exit code to use.
    """
    argv, path, os_exit = sys.argv, sys.path[:], os._exit
    sys.argv = [target.name, *target.args]
    sys.path.insert(0, str(Path.cwd() if target.is_module else Path(target.name).resolve().parent))
    if if_it_leaves is not None:
        setattr(os, "_exit", _reporting_exit(os_exit, if_it_leaves))  # noqa: B010 - typed as a function, not assignable
    try:
        yield
    finally:
        setattr(os, "_exit", os_exit)  # noqa: B010
        sys.argv = argv
        sys.path[:] = path


def _reporting_exit(os_exit: Callable[[int], NoReturn], report: Callable[[Outcome], int]) -> Callable[[int], NoReturn]:
    """An `os._exit` that reports first, in this process; in its forked children it is the real one."""
    pid = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != pid:
            os_exit(status)
        code = status
        setattr(os, "_exit", os_exit)  # noqa: B010
        if sys.stdout is not None:  # a file of our own: what the program left in its buffer is lost without us, too
            sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
        try:
            code = report(Outcome(status, f"the program left by os._exit({status})"))
            flush_stdout()
        finally:
            os_exit(code)

    return leave


def run(target: Target) -> Outcome:
    """Run the program to its end, threads included; inside `program(target)`. Its exceptions end as in Python:
    a traceback on stderr and exit code 1, never an exception of the probe. After Ctrl-C no thread is waited for here.
    """
    present, pid = set(threading.enumerate()), os.getpid()
    outcome = _outcome_of(lambda: _run_main(target))
    if outcome.exit_code != INTERRUPTED:
        waiting = _outcome_of(lambda: _join_others(present))
        outcome = waiting if waiting.failed else outcome
    flush_stdout()
    if os.getpid() != pid:  # a forked child of the program came out here as well: it is no business of the probe
        sys.exit(outcome.exit_code)
    return outcome


def _join_others(present: set[threading.Thread]) -> None:
    pool_workers = concurrent.futures.thread._threads_queues
    for thread in set(threading.enumerate()) - present:
        # a pool's idle worker ends only when the interpreter does: waiting for it here would wait for ever
        if not thread.daemon and thread not in pool_workers:
            thread.join()


def _run_main(target: Target) -> None:
    if target.is_module:
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target.name, run_name="__main__")


def _outcome_of(body: Callable[[], None]) -> Outcome:
    try:
        body()
    except SystemExit as leaving:
        return _exit_outcome(leaving)
    except BaseException as error:  # noqa: BLE001 - whatever a program dies of is its outcome, not ours
        traceback.print_exception(error.with_traceback(_program_part(error.__traceback__)))
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return Outcome(code, f"{type(error).__name__}: {error}".splitlines()[0])
    return Outcome(0, "")


def _program_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on: what Python alone would have printed."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return trace


def _exit_outcome(leaving: SystemExit) -> Outcome:
    if leaving.code is None or isinstance(leaving.code, int):
        return Outcome(leaving.code or 0, "")
    print(leaving.code, file=sys.stderr)
    return Outcome(1, str(leaving.code))


@dataclass(frozen=True)
class FoundFunction:
    """A function named `module:function` or `module:Class.method`, and every place that holds it."""

    spec: str
    function: Callable[..., Any]
    places: tuple[tuple[Any, str], ...]


def find_function(spec: str) -> FoundFunction:
    """Import the module and find the function; UsageProblem with the nearest name when it is not there."""
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise UsageProblem(f"expected module:function, got {spec!r}")
    if module_name == "__main__":
        raise UsageProblem(f"expected a function of an importable module, got {spec!r}; move it out of the script")
    module = _imported(module_name)
    holder: Any = module
    *parents, attribute = path.split(".")
    for step in (*parents, attribute):
        if not hasattr(holder, step):
            offer = nearest(step, vars(holder))
            raise UsageProblem(f"expected a function, got {spec!r}: {module_name} has no {path}{offer}")
        found, holder = holder, getattr(holder, step)
    if not callable(holder) or isinstance(holder, type):
        raise UsageProblem(f"expected a function, got {spec!r}, which is a {type(holder).__name__}")
    if isinstance(inspect.getattr_static(found, attribute), (staticmethod, classmethod, property)):
        raise UsageProblem(f"expected a plain function or method, got {spec!r}; watch the function that it calls")
    places = ((found, attribute),) if parents else _module_level_places(holder, (found, attribute))
    return FoundFunction(spec, holder, places)


def _imported(name: str) -> ModuleType:
    _existing_module(name)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _broken_module(name, error) from error


def _module_level_places(function: object, home: tuple[Any, str]) -> tuple[tuple[Any, str], ...]:
    """Every module attribute that is this function: `from m import f` made copies of the reference."""
    places = [home]
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function and not (module is home[0] and name == home[1]):
                places.append((module, name))
    return tuple(places)


@contextmanager
def rebound(found: FoundFunction, replacement: Callable[..., Any]) -> Iterator[None]:
    """Put a replacement in every place of a function, for the process; restored where it is still ours."""
    inherited = [name not in vars(holder) for holder, name in found.places]
    for holder, name in found.places:
        setattr(holder, name, replacement)
    try:
        yield
    finally:
        for (holder, name), was_inherited in zip(found.places, inherited, strict=True):
            if vars(holder).get(name) is not replacement:
                continue
            if was_inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, found.function)
