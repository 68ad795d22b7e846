"""Checks of what a run takes: memory by part, disk, time; each beside what there is."""

from collections.abc import Iterator

from dflash.doctor.base import Check, Subject, failed, passed, warned
from dflash.doctor.estimate import Duration, Memory, checkpoint_bytes, disk_bytes, duration, feature_bytes, memory
from dflash.doctor.measure import available_bytes, free_disk_bytes, measured_rates, plan_of, process_bytes, shape_of
from dflash.doctor.resident import resident_bytes
from dflash.live_view import duration as clock

# a GPU's context and the allocator's waste, which are no tensor of ours
CUDA_PROCESS = 600 << 20
TIGHT = 0.85
DAY_S = 86400.0


def checks(subject: Subject) -> Iterator[Check]:
    """Memory first: where it does not fit, no step is tried to measure time."""
    shape, device = shape_of(subject), subject.device
    on_cpu = device.type == "cpu"
    needed = memory(shape, process_bytes(subject, shape) if on_cpu else CUDA_PROCESS, on_cpu=on_cpu)
    available = available_bytes(device)
    # what is loaded already is part of the need and no longer free
    room = None if available is None else available + (resident_bytes() if on_cpu else shape.target_bytes)
    check = memory_check(needed, room)
    yield check
    plan, store = plan_of(subject), subject.store
    stored = 0
    if subject.config.data.features == "cache":
        stored = feature_bytes(store.meta.tokens, shape.features, shape.width, shape.target_value)
    disk = disk_bytes(plan, shape.parameters, stored) + checkpoint_bytes(shape.parameters)
    yield disk_check(disk, free_disk_bytes(subject.config.output))
    if check.status != "fail" and subject.measure:
        yield time_check(duration(plan, measured_rates(subject)), plan.steps)


def memory_check(needed: Memory, room: int | None) -> Check:
    """The peak beside what is free, its parts named."""
    largest = sorted(needed.by_part().items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {size(count)}" for name, count in largest if name != "peak" and count)
    found = f"{size(needed.peak)} at the peak ({parts}), {'unknown' if room is None else size(room)} free"
    smaller = "lower --drafter.max-anchors, --data.row-tokens or --data.batch-rows, or add --checkpoint-layers"
    if room is not None and needed.peak > room:
        return failed("memory", found, smaller)
    if room is not None and needed.peak > TIGHT * room:
        return warned("memory", found, f"this is tight: {smaller}")
    return passed("memory", found)


def disk_check(needed: int, free: int) -> Check:
    """The run's directory beside the free space."""
    found = f"{size(needed)} at most for checkpoints, export, features and metrics, {size(free)} free"
    if needed > free:
        return failed("disk", found, "make room, choose another --output, or lower --keep")
    if needed > TIGHT * free:
        return warned("disk", found, "this is tight: make room, or lower --keep")
    return passed("disk", found)


def time_check(estimate: Duration, steps: int) -> Check:
    """Training at the measured rate, evaluations at most."""
    found = (
        f"{clock(estimate.steps_s)} for {steps} steps ({1e3 * estimate.steps_s / steps:.0f} ms each), "
        f"evaluations at most {clock(estimate.evaluations_s)}"
    )
    if estimate.evaluations_s > estimate.steps_s and estimate.total_s > DAY_S / 24:
        return warned("time", found, "evaluations may take longer than training: raise --eval.every")
    if estimate.total_s > 14 * DAY_S:
        return warned("time", found, "more than two weeks: fewer --steps or --optim.epochs, or a faster device")
    return passed("time", found)


def size(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
