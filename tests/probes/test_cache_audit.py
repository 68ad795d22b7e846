"""probes.cache_audit on a cache poisoned on purpose and on clean ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import watched_cache_program

from probes import cache_audit
from probes.command_line import UsageProblem
from probes.lowerable import lowers_always
from probes.torch_internals import torch_release

PROGRAMS = Path(__file__).with_name("cache_programs.py")


def fill(cache: Path, mode: str) -> str:
    """Run one of cache_programs in a child on this cache; returns the last line it printed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(PROGRAMS), mode]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "probes.cache_audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(torch_release() < (2, 12), reason="torch 2.11 has no fallback_to_eager annotation to poison with")
def test_a_poisoned_cache_is_found_kept_by_a_clean_run_and_healed_by_delete(
    tmp_path: Path, poisoning: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(poisoning["cache"], cache)
    found = cache_audit.audit(cache)
    assert found.finding
    assert {op.op for entry in found.degraded for op in entry.ops} == {
        "aten::sin.default",
        "aten::mul.Tensor",
        "aten::add.Tensor",
    }
    assert any(entry.file.startswith("fxgraph/") for entry in found.degraded)
    values = poisoning["first"][1]
    assert poisoning["served"][1] == values, "the values are right all along: that is why nobody notices"

    kernels = sorted(cache.rglob("*.so"))
    done = probe(str(cache), "--delete", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["deleted"] == [entry.file for entry in found.degraded]
    assert not any((cache / entry.file).exists() for entry in found.degraded)
    assert sorted(cache.rglob("*.so")) == kernels, "only the degraded entries go"

    code, printed, report = watched_cache_program(cache, "clean")  # compiled anew, this time whole
    assert (code, report["degraded"], printed) == (0, [], values)
    assert cache_audit.audit(cache).degraded == ()


def test_a_clean_cache_of_fifty_graphs_full_of_rightful_eager_calls_raises_no_alarm(tmp_path: Path) -> None:
    assert int(fill(tmp_path, "wide")) >= 50
    stored = [path for path in (tmp_path / "fxgraph").glob("*/*/*") if path.is_file()]
    assert len(stored) >= 50
    found = cache_audit.audit(tmp_path)
    assert found.degraded == ()
    assert found.programs >= 100  # each graph's code file and its stored copy
    assert any("torch.ops.aten.topk" in path.read_text() for path in tmp_path.glob("??/*.py"))


@pytest.mark.parametrize(
    ("op", "always"),
    [("sin.default", True), ("add.Tensor", True), ("sum.dim_IntList", True), ("sort.stable", False),
     ("cat.default", False), ("pow.Tensor_Scalar", False), ("topk.default", False), ("no_such_op.default", False)],
)  # fmt: skip
def test_only_ops_whose_lowering_cannot_fall_back_are_accused(op: str, always: bool) -> None:
    name, overload = op.split(".")
    assert lowers_always("aten", name, overload) is always


def test_the_same_call_on_complex_tensors_is_not_accused() -> None:
    source = "# AOT ID: ['0']\nbuf0 = torch.ops.aten.mul.Tensor(arg0, 2)\n"
    assert [op.op for op in cache_audit.degraded_ops(source)] == ["aten::mul.Tensor"]
    assert cache_audit.degraded_ops(source + "rand_strided((2,), (1,), dtype=torch.complex64)") == ()


def test_stored_entries_are_read_without_running_what_they_pickle(tmp_path: Path) -> None:
    bomb = tmp_path / "fxgraph" / "ab" / "fabc" / "entry"
    bomb.parent.mkdir(parents=True)
    # a pickle that would create a file when loaded, followed by a program
    bomb.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    assert cache_audit.audit(tmp_path).programs == 0
    assert not (tmp_path / "ran").exists()


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="does not exist"):
        cache_audit.audit(tmp_path / "nowhere")
    with pytest.raises(UsageProblem, match="does not exist"):
        cache_audit.main([str(tmp_path / "nowhere")])


def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageProblem, match="is a file"):
        cache_audit.audit(tmp_path / "file")


def test_an_empty_directory_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_audit.main([str(tmp_path)]) == 0
    assert "0 entries degraded" in capsys.readouterr().out
