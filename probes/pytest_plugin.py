"""pytest plugin: `-p probes.pytest_plugin`. The fixture or marker `quiet_torch` fails a test that leaks torch state.

    def test_something(quiet_torch): ...

    @pytest.mark.quiet_torch(rng=True)     # random generators must be where they were, too
    def test_other(): ...

What must be as before: flags, patches, annotations, stance, compile_lock, default dtype, deterministic mode, settings
of the test's own thread. Random draws are allowed unless `rng=True`. The test's own failure, if any, is reported first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from probes import torch_internals as ti

MARKER = "quiet_torch"


class TorchStateLeaked(AssertionError):
    """A test left torch's process state changed; names each state with its value before and after."""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, so that --strict-markers knows it."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(rng=False): fail the test when it leaks compile or trace state; rng: random generators too",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The marker asks for the fixture, before all others so that their clean-up is inside the check."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker(MARKER) is not None and MARKER not in names:
            names.insert(0, MARKER)


@pytest.fixture
def quiet_torch(request: pytest.FixtureRequest) -> Iterator[ti.Snapshot]:
    """The state before the test; after it, fails with every difference. Per process and for the test's thread."""
    mark = request.node.get_closest_marker(MARKER)
    with_rng = bool(mark is not None and mark.kwargs.get("rng", False))
    before = ti.snapshot()
    yield before
    leaked = ti.differences(before, ti.snapshot(), ignore=frozenset() if with_rng else ti.RANDOM_FIELDS)
    if leaked:
        raise TorchStateLeaked(f"{request.node.name} leaked torch state: " + "; ".join(map(str, leaked)))
