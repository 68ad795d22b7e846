"""Private torch state: every promised name is there, a gone one is named, and what changes is seen."""

import pickle
import threading

import pytest
import torch

from probes import torch_internals as ti
from probes.torch_internals import names


def test_every_name_of_the_table_is_in_the_installed_torch():
    assert ti.missing_names() == ()


def test_a_name_that_is_gone_raises_with_name_and_version(monkeypatch):
    monkeypatch.setitem(ti.NAMES, "fx.gone", ti.PrivateName("torch.fx._symbolic_trace", "Tracer.gone"))
    with pytest.raises(ti.UnsupportedTorch, match=r"torch\.fx\._symbolic_trace\.Tracer\.gone") as caught:
        ti.resolve("fx.gone")
    assert caught.value.version == torch.__version__
    assert ti.missing_names() == ("torch.fx._symbolic_trace.Tracer.gone",)


def test_a_name_of_another_release_raises_without_being_looked_up(monkeypatch):
    monkeypatch.setitem(ti.NAMES, "old", ti.PrivateName("torch.no_such_module", "name", last=(2, 10)))
    assert not ti.available("old")
    with pytest.raises(ti.UnsupportedTorch, match="no_such_module"):
        ti.resolve("old")


def test_a_release_outside_the_supported_ones_is_refused(monkeypatch):
    monkeypatch.setattr(names.torch, "__version__", "2.16.0")
    with pytest.raises(ti.UnsupportedTorch, match=r"2\.16\.0"):
        ti.torch_release()


def test_the_error_survives_pickling_to_another_process():
    error = pickle.loads(pickle.dumps(ti.UnsupportedTorch("torch.x", "2.99")))
    assert (error.name, error.version) == ("torch.x", "2.99")


def test_replacing_a_name_restores_it_after_an_exception():
    before = ti.resolve("fx.trace")
    with pytest.raises(KeyError), ti.replaced("fx.trace", lambda *_: None):  # noqa: PT012
        assert ti.resolve("fx.trace") is not before
        raise KeyError
    assert ti.resolve("fx.trace") is before


def test_a_snapshot_imports_nothing_and_is_at_rest_in_a_new_process(child):
    code = (
        "import sys; from probes import torch_internals as ti; s = ti.snapshot();"
        "print('torch._dynamo' in sys.modules, ti.not_at_rest(s), ti.differences(s, ti.snapshot()))"
    )
    assert child("-c", code).stdout == "False () ()\n"


def test_a_trace_shows_as_flag_patcher_and_patched_module():
    seen = []

    def traced(x):
        seen.extend(ti.not_at_rest(ti.snapshot()))
        return x

    torch.fx.symbolic_trace(traced)
    assert {each.name for each in seen} == {"fx_flag", "fx_patcher", "module_call_original", "module_getattr_original"}
    assert ti.not_at_rest(ti.snapshot()) == ()


def test_a_compile_shows_as_lock_owner_and_code_builder():
    seen = {}

    def backend(graph, inputs):
        seen.update((each.name, each.after) for each in ti.not_at_rest(ti.snapshot()))
        return graph.forward

    torch.compile(lambda x: x - 3, backend=backend)(torch.ones(2))
    assert seen["compile_lock_owner"] == str(threading.get_ident())
    assert "forward_from_src_original" in seen
    assert ("compiling_flag" in seen) == (ti.torch_release() >= (2, 13))


def test_random_draws_are_a_difference_only_when_asked_for():
    before = ti.snapshot()
    torch.rand(1)
    assert [each.name for each in ti.differences(before, ti.snapshot())] == ["rng_torch"]
    assert ti.differences(before, ti.snapshot(), ignore=ti.RANDOM_FIELDS) == ()


def test_a_setting_is_a_difference_under_its_own_name():
    before = ti.snapshot()
    with ti.dynamo_config().patch(recompile_limit=77):
        changed = ti.differences(before, ti.snapshot())
    assert [str(each) for each in changed] == ["config.torch._dynamo.config.recompile_limit: default -> 77"]


def test_reading_settings_does_not_write_them():
    ti.dynamo_config()
    first = ti.config_overrides()
    assert ti.config_overrides() == first == {}


def test_the_owner_of_a_lock_is_seen_from_another_thread():
    lock = threading.RLock()
    owners = []
    with lock, lock:
        thread = threading.Thread(target=lambda: owners.append(ti.lock_state(lock)))
        thread.start()
        thread.join()
    assert owners == [ti.LockState(threading.get_ident(), 2)]
    assert ti.lock_state(lock) == ti.LockState(None, 0)


def test_a_lock_whose_owner_cannot_be_read_is_refused():
    with pytest.raises(ti.UnsupportedTorch, match="readable owner"):
        ti.lock_state(threading.Lock())


def test_the_fx_check_is_found_on_its_line_of_torchs_source():
    check = ti.compile_wrapper_check()
    with open(check.file) as source:
        lines = source.read().splitlines()
    assert "is_fx_symbolic_tracing()" in lines[check.line - 1]


def test_an_observed_check_answers_as_torch_does_and_is_removed():
    original = ti.resolve("fx.is_symbolic_tracing").__code__
    asked = []
    with ti.observed_fx_checks(lambda ask: asked.append(ask()) or asked[-1]):
        assert ti.is_fx_symbolic_tracing() is False
        torch.fx.symbolic_trace(lambda x: (ti.is_fx_symbolic_tracing(), x)[1])
    assert asked == [False, True]
    assert ti.resolve("fx.is_symbolic_tracing").__code__ is original


def test_patched_module_methods_can_be_repaired():
    torch.nn.Module.__call__ = lambda self, *args: None
    assert not ti.module_call_is_original()
    ti.restore_module_methods()
    assert ti.module_call_is_original()
    assert ti.module_getattr_is_original()
