"""Tests for the plugin to judge: run by name, never collected by the suite."""

import pytest
import torch


@pytest.mark.quiet_torch
def test_that_draws_random_numbers():
    torch.rand(3)


@pytest.mark.quiet_torch(rng=True)
def test_that_may_not_draw():
    torch.rand(3)


def test_that_leaves_a_stance(quiet_torch):
    torch.compiler.set_stance("force_eager")


def test_that_cleans_up(quiet_torch):
    with torch.compiler.set_stance("force_eager"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)


@pytest.mark.quiet_torch
def test_that_leaves_a_dtype():
    torch.set_default_dtype(torch.float64)


def test_that_nobody_watches():
    torch.set_default_dtype(torch.float32)
    torch.compiler.set_stance("default")
