"""Replicas: the sum of their gradients is one drafter's on the whole batch, bit for bit where the order is the same."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dflash.pipeline.gradients import Replicas


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(5, 16, generator=generator) * 10**index for index in range(count)]


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def whole(inputs: list[Tensor]) -> dict[str, Tensor]:
    one = network()
    for x in inputs:
        one(x).square().sum().backward()
    return gradients(one)


def spread(inputs: list[Tensor], count: int) -> list[nn.Sequential]:
    models = [copy.deepcopy(network()) for _ in range(count)]
    for index, x in enumerate(inputs):
        models[index % count](x).square().sum().backward()
    return models


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_batch_a_replica_gives_the_very_bits_of_one_drafter(count: int) -> None:
    inputs = batches(count)
    models = spread(inputs, count)
    Replicas([named(model) for model in models]).sum_gradients()
    got, expected = gradients(models[0]), whole(inputs)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_shares_of_several_batches_agree_to_rounding_and_repeat_to_the_bit() -> None:
    runs = []
    for _ in range(2):
        models = spread(batches(5), 3)
        Replicas([named(model) for model in models]).sum_gradients()
        runs.append(gradients(models[0]))
    expected = whole(batches(5))
    for name, value in expected.items():
        assert torch.equal(runs[0][name], runs[1][name])
        torch.testing.assert_close(runs[0][name], value, rtol=1e-5, atol=1e-5 * value.abs().max().item())


def test_a_replica_without_anything_to_train_on_adds_nothing() -> None:
    inputs = batches(2)
    models = [copy.deepcopy(network()) for _ in range(3)]
    models[1](inputs[0]).square().sum().backward()
    models[2](inputs[1]).square().sum().backward()
    Replicas([named(model) for model in models]).sum_gradients()
    got, expected = gradients(models[0]), whole(inputs)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_no_replica_with_a_gradient_leaves_none() -> None:
    models = [network(), network()]
    Replicas([named(model) for model in models]).sum_gradients()
    assert gradients(models[0]) == {}


def test_gradients_of_the_others_are_gone_and_weights_are_the_first_ones() -> None:
    models = spread(batches(2), 2)
    replicas = Replicas([named(model) for model in models])
    replicas.sum_gradients()
    assert gradients(models[1]) == {}
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(1.0)
    assert not torch.equal(models[0][0].weight, models[1][0].weight)
    replicas.spread_weights()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert models[0][0].weight.data_ptr() != models[1][0].weight.data_ptr()


def test_replicas_of_another_model_are_refused() -> None:
    with pytest.raises(AssertionError, match="replicas of one drafter"):
        Replicas([named(network()), named(nn.Linear(2, 2))])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_collective_sums_on_gpus_equal_the_plain_ones() -> None:
    inputs = batches(2)
    models = [network().to(f"cuda:{index}") for index in range(2)]
    for model, x in zip(models, inputs, strict=True):
        model(x.to(model[0].weight.device)).square().sum().backward()
    replicas = Replicas([named(model) for model in models])
    assert replicas.collective
    replicas.sum_gradients()
    expected = whole(inputs)
    for name, value in gradients(models[0]).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-4, atol=1e-4 * scale)
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(1.0)
    replicas.spread_weights()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*(m.parameters() for m in models), strict=True))
