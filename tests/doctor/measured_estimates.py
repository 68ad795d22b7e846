"""Estimates of memory and disk beside what real runs take:  python -m tests.doctor.measured_estimates"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SHORT = (
    *("--device", "cpu", "--steps", "4", "--save-every", "2", "--eval.every", "0", "--eval.prompts", "1"),
    *("--eval.max-new-tokens", "8"),
)
# five configurations whose largest parts differ
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "soft labels": (
        *("--objective.name", "kl", "--drafter.block-size", "16", "--drafter.max-anchors", "192"),
        *("--data.batch-rows", "2"),
    ),
    "many rows": ("--data.batch-rows", "12", "--drafter.layers", "4", "--optim.accumulate", "2"),
    "recomputed layers, bfloat16": (
        *("--checkpoint-layers", "--dtype", "bfloat16", "--data.batch-rows", "8", "--drafter.layers", "6"),
        *("--drafter.max-anchors", "128"),
    ),
    "deep drafter": ("--drafter.layers", "48", "--drafter.features", "3", "--drafter.max-anchors", "16"),
}
# runs in a child: resident memory before loading must be that of a fresh process
ESTIMATE = """
import json, sys
from dflash.command_line import training_config
from dflash.doctor.base import Subject
from dflash.doctor.estimate import disk_bytes, memory
from dflash.doctor.groups import GROUPS
from dflash.doctor.measure import plan_of, process_bytes, shape_of
subject = Subject(training_config(sys.argv[1:]))
shape = shape_of(subject)
needed = memory(shape, process_bytes(subject, shape), on_cpu=True)
print(json.dumps({"memory": needed.by_part(), "disk": disk_bytes(plan_of(subject), shape.parameters, 0)}))
"""
# the peak is this program's own: getrusage would count what the parent held when it forked
RUN = """
import json, re, sys
from dflash.cli import main
code = main(["train", *sys.argv[1:]])
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
print(json.dumps({"code": code, "peak": peak}))
"""


@dataclass(frozen=True)
class Compared:
    """Bytes estimated and measured."""

    estimated_memory: int
    measured_memory: int
    estimated_disk: int
    measured_disk: int
    parts: dict[str, int]

    @property
    def memory_error(self) -> float:
        """Estimated / measured - 1."""
        return self.estimated_memory / self.measured_memory - 1


def compare(options: tuple[str, ...], output: Path) -> Compared:
    """Estimates, then runs for real into `output`."""
    words = [*SHORT, *options, "--output", str(output)]
    estimated = _child(ESTIMATE, words)
    measured = _child(RUN, words)
    assert measured["code"] == 0
    disk = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return Compared(
        estimated["memory"]["peak"], measured["peak"], estimated["disk"], disk, estimated["memory"]
    )


def _child(program: str, words: list[str]) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """A line a configuration."""
    for name, options in CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = compare(options, Path(directory) / "run")
        megabytes = {part: round(size / 2**20) for part, size in found.parts.items()}
        print(
            f"{name}: memory {found.estimated_memory / 2**20:.0f} of {found.measured_memory / 2**20:.0f} MiB "
            f"({100 * found.memory_error:+.1f} %), disk {found.estimated_disk / 2**20:.1f} of "
            f"{found.measured_disk / 2**20:.1f} MiB  {megabytes}",
            flush=True,
        )


if __name__ == "__main__":
    main()
