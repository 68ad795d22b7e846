"""The plugin fails exactly the tests that leak, and names what leaked."""

import re
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "programs" / "leaky_cases.py"


@pytest.fixture
def outcome(child):
    done = child("-m", "pytest", "-p", "probes.pytest_plugin", "-p", "no:cacheprovider", "-q", "-rA", CASES)
    return done.stdout


def test_only_tests_that_leak_fail_and_the_leak_is_named(outcome):
    errors = dict(re.findall(r"^ERROR \S+::(\w+) - (.*)$", outcome, re.MULTILINE))
    assert set(errors) == {"test_that_may_not_draw", "test_that_leaves_a_stance", "test_that_leaves_a_dtype"}, outcome
    assert "test_that_leaves_a_stance leaked torch state: stance: default -> force_eager" in outcome
    assert "default_dtype: torch.float32 -> torch.float64" in outcome
    assert re.search(r"test_that_may_not_draw leaked torch state: rng_torch", outcome)
    assert "6 passed, 3 errors" in outcome
