"""The contract of every strategy: same loss and gradients as plain SDPA, compiled where it says so, no state left."""

import threading
import warnings

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.attention.base import step_key
from dflash.attention.compiled_calls import counted_compiled_calls
from dflash.attention.force import FLAG, ForceCompile, forced
from dflash.attention.locked import LockedCompile
from dflash.attention.select import STRATEGIES, choose
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import CrossEntropy
from dflash.errors import StrategyError
from probes.torch_internals import RANDOM_FIELDS, config_is_per_context, differences, dynamo_config, snapshot
from tests.drafter.parts import draw, make_drafter, make_features, make_rows

COMPILED = ("locked-compile", "force-compile", "isolated")
Result = tuple[Tensor, dict[str, Tensor]]


def step(drafter: DFlashDrafter, tokens: int = 40, seed: int = 0) -> Result:
    assert drafter.backend is not None
    strategy = drafter.backend.strategy
    rows = make_rows([[tokens - 12 - seed, 9]], tokens, seed=seed)
    features = make_features(rows)
    drafter.zero_grad()
    with strategy.thread_scope(), strategy.step_scope(step_key(features.hidden, rows.input_ids)):
        out = drafter.terms(rows, features, draw(rows, drafter), CrossEntropy())
        out.loss_sum.backward()
    return out.loss_sum.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def built(strategy: str, scope: str = "attention") -> DFlashDrafter:
    drafter = make_drafter()
    drafter.use_attention(choose(strategy, "auto", "cpu", scope=scope))  # type: ignore[arg-type]
    return drafter


def assert_same(got: Result, expected: Result) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=1e-4, rtol=1e-5)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("scope", ["attention", "layer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_and_gradients_equal_plain_sdpa_in_every_step(strategy: str, scope: str) -> None:
    reference, drafter = built("sdpa"), built(strategy, scope)
    for seed in range(3):
        assert_same(step(drafter, seed=seed), step(reference, seed=seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_instances_run_their_own_code_and_leave_torch_as_it_was_also_after_exceptions(
    strategy: str,
) -> None:
    before = snapshot()
    reference, drafters = built("sdpa"), [built(strategy), built(strategy)]
    with counted_compiled_calls() as count:
        for seed in range(2):
            expected = step(reference, seed=seed)
            for drafter in drafters:
                assert_same(step(drafter, seed=seed), expected)
        ran = count.value()
    # two instances, two steps, two layers, forward and backward
    assert ran == (16 if strategy in COMPILED else 0)
    made = STRATEGIES[strategy]()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), made.thread_scope(), made.step_scope("key"):
            raise ZeroDivisionError
    assert not differences(before, snapshot(), ignore=RANDOM_FIELDS)


@pytest.mark.parametrize("scope", ["attention", "layer"])
@pytest.mark.parametrize("strategy", COMPILED)
def test_steps_of_one_shape_never_recompile_and_another_shape_does(strategy: str, scope: str) -> None:
    drafter = built(strategy, scope)
    step(drafter)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (1, 2):
            step(drafter, seed=seed)
        with pytest.raises(RuntimeError, match="recompile"):
            step(drafter, tokens=52)


@pytest.mark.parametrize("strategy", ["eager", "sdpa"])
def test_uncompiled_strategies_never_enter_the_compiler(strategy: str) -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        step(built(strategy))


def test_a_step_is_cold_once_a_key_and_warm_afterwards() -> None:
    drafter = built("locked-compile")
    assert drafter.backend is not None
    strategy = drafter.backend.strategy
    assert isinstance(strategy, LockedCompile)
    for seed in (0, 1, 2):
        step(drafter, seed=seed)
    assert strategy.cold_steps == 1
    step(drafter, tokens=44)
    assert strategy.cold_steps == 2


def test_a_step_that_failed_stays_cold_and_releases_the_gate() -> None:
    strategy = LockedCompile()
    with pytest.raises(ZeroDivisionError), strategy.step_scope("key"):
        raise ZeroDivisionError
    assert strategy.cold_steps == 0
    with strategy.step_scope("key"):
        pass
    assert strategy.cold_steps == 1


def test_threads_with_drafters_of_their_own_compile_cold_side_by_side_and_agree_with_one_thread() -> None:
    expected = [step(built("sdpa"), tokens=36 + 4 * i) for i in range(3)]
    drafters = [built("locked-compile") for _ in range(3)]
    results: list[Result | None] = [None] * 3

    def run(index: int) -> None:
        for _ in range(2):
            results[index] = step(drafters[index], tokens=36 + 4 * index)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for got, want in zip(results, expected, strict=True):
        assert got is not None
        assert_same(got, want)


def test_the_force_flag_is_set_inside_the_scope_and_restored_after_overlapping_scopes_of_two_threads() -> None:
    config, seen = dynamo_config(), []
    before = getattr(config, FLAG)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with forced():
            inside.set()
            leave.wait(10)
            seen.append(getattr(config, FLAG))
        seen.append(getattr(config, FLAG))

    thread = threading.Thread(target=other)
    with forced():
        thread.start()
        assert inside.wait(10)
        assert getattr(config, FLAG) is True
    outside = getattr(config, FLAG)
    leave.set()
    thread.join(10)
    assert seen == [True, before]
    assert outside is (before if config_is_per_context() else True)  # 2.11: one flag, kept while a thread needs it
    assert getattr(config, FLAG) is before


def test_force_compile_refuses_a_call_from_its_own_threads_trace_and_runs_beside_another_threads() -> None:
    strategy = ForceCompile()
    call = strategy.compile(lambda x: x * 2, role="attention")
    inside, leave = threading.Event(), threading.Event()

    def traced(x: Tensor) -> Tensor:
        inside.set()
        leave.wait(60)
        return x + 1

    with strategy.thread_scope():
        with pytest.raises(StrategyError, match="outside any trace of its thread"):
            make_fx(call)(torch.ones(2))
        thread = threading.Thread(target=lambda: make_fx(traced)(torch.ones(2)))
        thread.start()
        assert inside.wait(60)
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
        leave.set()
        thread.join(60)


def test_step_keys_tell_shapes_dtypes_grad_mode_and_autocast_apart() -> None:
    x = torch.zeros(2, 3)
    with torch.no_grad():
        no_grad = step_key(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = step_key(x)
    keys = {step_key(x), step_key(x.double()), step_key(x.T), no_grad, cast, step_key(x, extra="block 8")}
    assert len(keys) == 6
    assert step_key(torch.ones(2, 3)) == step_key(x)


def test_no_strategy_warns_or_needs_a_gpu_to_be_built() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {make().name for make in STRATEGIES.values()} == set(STRATEGIES)
