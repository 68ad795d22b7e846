"""A program runs under a probe as it would alone, and bad use is one line and exit 2."""

import json
import sys
import threading

import pytest

from probes.command_line import UsageProblem, split_target
from probes.run_target import find_function, find_target, program, rebound, run


def test_a_script_sees_main_its_arguments_and_its_own_folder(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.WORD)")
    argv, path = sys.argv, sys.path[:]
    with program(target := find_target([str(script), "--flag", "7"])):
        assert run(target).exit_code == 0
    assert capsys.readouterr().out == "__main__ ['--flag', '7'] found\n"
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize(
    ("body", "exit_code", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_the_outcome_is_what_python_would_have_given(tmp_path, body, exit_code, error):
    script = tmp_path / "script.py"
    script.write_text(body)
    with program(target := find_target([str(script)])):
        outcome = run(target)
    assert outcome.exit_code == exit_code
    assert error in outcome.error


def test_a_programs_traceback_begins_in_the_program(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("def f(): 1 / 0\nf()")
    with program(target := find_target([str(script)])):
        run(target)
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "run_target" not in err


def test_threads_left_running_are_waited_for_but_idle_pools_are_not(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1); pool.submit(int).result()\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\n"
    )
    with program(target := find_target([str(script)])):
        run(target)
    assert capsys.readouterr().out == "late\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "expected a program"),
        ([], "expected a program"),
        (["-m"], "expected a module name"),
        (["-m", "probes.fx_stat"], "did you mean 'probes.fx_state'"),
        (["-m", "prober.fx_state"], "there is no prober; did you mean 'probes'"),
        (["tests/probes/programs/setting_in_man.py"], "did you mean 'setting_in_main.py'"),
        (["tests/probes"], "the folder"),
    ],
)
def test_a_program_that_is_not_there_is_named_with_the_nearest(words, message):
    with pytest.raises(UsageProblem, match=message) as caught:
        find_target(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("json", "expected module:function"),
        ("json:dumpss", "did you mean 'dumps'"),
        ("json:JSONEncoder.encod", "did you mean 'encode'"),
        ("json:JSONEncoder", "is a type"),
        ("pathlib:Path.cwd", "a plain function or method"),
        ("__main__:f", "importable module"),
    ],
)
def test_a_function_that_cannot_be_watched_is_named_with_the_nearest(spec, message):
    with pytest.raises(UsageProblem, match=message):
        find_function(spec)


def test_a_rebound_function_is_replaced_wherever_it_was_imported_and_restored():
    original, elsewhere = json.dumps, type(sys)("elsewhere")
    elsewhere.copy_of_it = json.dumps
    sys.modules["elsewhere"] = elsewhere
    try:
        with pytest.raises(KeyError), rebound(find_function("json:dumps"), lambda: "ours"):  # noqa: PT012
            assert json.dumps() == elsewhere.copy_of_it() == "ours"
            raise KeyError
        assert json.dumps is elsewhere.copy_of_it is original
    finally:
        del sys.modules["elsewhere"]


def test_an_inherited_method_is_inherited_again_afterwards():
    assert "start" not in vars(threading.Timer)
    with rebound(find_function("threading:Timer.start"), lambda self: None):
        assert "start" in vars(threading.Timer)
    assert "start" not in vars(threading.Timer)


def test_words_are_cut_at_the_first_double_dash():
    assert split_target(["--json", "--", "a.py", "--", "b"]) == (["--json"], ["a.py", "--", "b"])
    assert split_target(["--json"]) == (["--json"], None)
