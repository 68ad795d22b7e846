"""fx_state tells a race from a program's own trace, names both threads, and leaves the program as it was."""

import functools
import json
from pathlib import Path

import pytest
import torch
from children import REPOSITORY, run_child, split_report

from probes import fx_state
from probes import torch_internals as ti
from probes.command_line import UsageProblem
from probes.fx_recorder import FxRecorder, Verdict, phase
from probes.fx_state import watch_fx_state

PROGRAM = Path(__file__).parent / "programs" / "trace_beside_call.py"
SHARED_FLAG = not ti.fx_flag_is_per_thread()


@functools.cache
def _watched(mode):
    words = ("--json", "--watch", "attention_module:attention", "--", PROGRAM, mode)
    done = run_child("-m", "probes.fx_state", *words)
    assert done.stdout, done.stderr
    return done.returncode, *split_report(done.stdout)


def test_a_trace_of_another_thread_is_a_race_and_both_threads_are_named():
    code, _, report = _watched("race")
    expected = Verdict.OTHER_THREAD if SHARED_FLAG else Verdict.PATCHED
    assert (code, report["verdict"]) == (1, expected.value)
    checks = [overlap for overlap in report["overlaps"] if "own check" in overlap["where"]]
    assert checks[0]["reader"].startswith("caller")
    assert checks[0]["writer"].startswith("tracer")
    assert checks[0]["began_s"] < checks[0]["read_s"] < checks[0]["ended_s"]
    guilty = next(reading["writer"] for reading in report["readings"] if reading["writer"])
    assert any("trace_beside_call.py" in line for line in guilty["stack"])


def test_every_entry_and_exit_of_the_watched_function_is_read():
    _, _, report = _watched("race")
    events = [r["event"] for r in report["readings"] if r["where"] == "attention_module:attention"]
    assert events == ["enter", "exit", "enter", "raise" if SHARED_FLAG else "exit"]


def test_a_trace_that_is_over_is_never_active():
    code, _, report = _watched("clean")
    assert (code, report["verdict"]) == (0, Verdict.NEVER.value)
    assert report["writings_seen"] >= 1


def test_a_call_inside_its_own_trace_is_inherent():
    code, _, report = _watched("same")
    assert (code, report["verdict"]) == (1, Verdict.SAME_THREAD.value)


def test_what_two_overlapping_traces_leave_behind_is_found():
    code, _, report = _watched("stuck")
    assert code == 1
    left = {each["name"] for each in report["leftover"]}
    assert "module_call_original" in left
    assert ("fx_flag" in left) == SHARED_FLAG
    if SHARED_FLAG:
        assert report["verdict"] == Verdict.LEFT_ON.value


def test_what_a_trace_and_a_higher_order_operator_leave_behind_is_found():
    code, _, report = _watched("stuck-b")
    left = {each["name"] for each in report["leftover"]}
    assert ("fx_flag" in left) == SHARED_FLAG
    assert code == (1 if SHARED_FLAG else 0)
    assert {writing["by"] for writing in report["writings"]} >= {"eager higher-order operator"}


def test_the_watched_programs_outcome_is_the_same_as_alone(child):
    alone = child(PROGRAM, "race")
    _, printed, report = _watched("race")
    assert printed == alone.stdout
    assert report["outcome"]["exit_code"] == alone.returncode


@pytest.mark.parametrize(("body", "same"), [("print('x', end='')", True), ("print('probes' in sys.modules)", False)])
def test_the_control_run_compares_with_and_without_the_probe(tmp_path, capsys, monkeypatch, body, same):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "script.py").write_text(f"import sys\n{body}")
    code = fx_state.main(["--control", "--", str(tmp_path / "script.py")])
    said = "the same output" if same else "DIFFERENT output"
    assert f"with and without the probe: {said}" in capsys.readouterr().out
    assert code == (0 if same else 1)


def test_a_function_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(UsageProblem, match="did you mean 'watch_fx_state'"):
        fx_state.main(["--watch", "probes.fx_state:watch_fx_stat", "--", str(PROGRAM), "clean"])


def test_a_watch_inside_a_watch_is_refused_and_the_first_goes_on():
    with watch_fx_state() as outer:
        with pytest.raises(RuntimeError, match="leave it first"), FxRecorder():
            pass
        torch.fx.symbolic_trace(lambda x: x)
        assert outer.report().writings_seen == 1


def test_torch_is_as_before_after_an_exception_in_the_watch():
    trace, environment = ti.resolve("fx.trace"), ti.resolve("hop.set_env")
    check = ti.resolve("fx.is_symbolic_tracing").__code__
    with pytest.raises(KeyError), watch_fx_state():  # noqa: PT012
        assert ti.resolve("fx.trace") is not trace
        raise KeyError
    assert ti.resolve("fx.trace") is trace
    assert ti.resolve("hop.set_env") is environment
    assert ti.resolve("fx.is_symbolic_tracing").__code__ is check


def test_phases_label_readings_and_cost_nothing_without_a_recorder():
    with phase("nobody listens"):
        pass
    with watch_fx_state() as watch, phase("forward"):
        pass
    assert [(r.phase, r.event) for r in watch.report().readings] == [("forward", "begin"), ("forward", "end")]


def test_the_eager_higher_order_environment_counts_as_a_writer():
    with watch_fx_state() as watch, ti.resolve("hop.set_env")():
        pass
    assert [writing.by for writing in watch.report().writings] == ["eager higher-order operator"]


def test_building_a_mask_uncompiled_traces_nothing_but_annotates_globally_from_2_13(child):
    done = child("-m", "probes.fx_state", "--json", "--", PROGRAM.with_name("build_mask.py"))
    report = json.loads(done.stdout.splitlines()[-1])
    written = {writing["by"] for writing in report["writings"]}
    expected = {"annotate({'fallback_to_eager': True})"} if ti.torch_release() >= (2, 13) else set()
    assert written == expected
    assert report["verdict"] == Verdict.NEVER.value


def test_a_compiled_annotation_is_the_same_under_the_probe():
    def annotated(x):
        with torch.fx.traceback.annotate({"tag": 1}):
            return x + 1

    def custom_metadata():
        seen = []

        def backend(graph, inputs):
            seen.extend(node.meta.get("custom") for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        torch.compile(annotated, backend=backend)(torch.ones(2))
        return seen

    alone = custom_metadata()
    with watch_fx_state():
        watched = custom_metadata()
    assert watched == alone
    assert {"tag": 1} in alone
