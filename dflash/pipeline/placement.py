"""Which devices run the target and which the drafter: `--targets cuda:0-4 --drafters cuda:5-7`."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash.errors import ConfigError

_PART = re.compile(r"(cpu)|(cuda)(?::([0-9]{1,3})(?:-([0-9]{1,3}))?)?")


@dataclass(frozen=True)
class Placement:
    """One thread a named device; a device may be named several times (useful on a CPU).

    threaded: false when one thread does both in turn.
    """

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    threaded: bool

    @property
    def shared(self) -> bool:
        """True when a GPU has both roles, so that they overlap on streams of one device."""
        return any(device.type == "cuda" and device in self.targets for device in self.drafters)

    def __str__(self) -> str:
        if not self.threaded:
            return f"{self.drafters[0]}, target and drafter in turn"
        return f"targets {spelled(self.targets)}, drafters {spelled(self.drafters)}"


def place(targets: str, drafters: str, default: torch.device, device_count: Callable[[], int]) -> Placement:
    """The placement that --targets and --drafters ask for; both empty: `default` for both roles.

    On a GPU that is two threads on streams of their own, on a CPU one thread. ConfigError: unreadable, or only one of
    the two given, or a device this machine does not have.
    """
    if not targets and not drafters:
        return Placement((default,), (default,), default.type == "cuda")
    if not targets or not drafters:
        missing = "--drafters" if targets else "--targets"
        raise ConfigError("both --targets and --drafters", f"no {missing}", "give both, or neither", where=missing)
    found = {name: devices(text, name, device_count) for name, text in (("targets", targets), ("drafters", drafters))}
    kinds = {device.type for several in found.values() for device in several}
    if len(kinds) > 1:
        raise ConfigError("one kind of device", " and ".join(sorted(kinds)), "use GPUs only, or cpu only")
    return Placement(found["targets"], found["drafters"], True)


def devices(text: str, option: str, device_count: Callable[[], int]) -> tuple[torch.device, ...]:
    """`cuda:0-4`, `cuda:0,cuda:3`, `cpu,cpu` -> devices in that order. ConfigError: unreadable or not there."""
    found: list[torch.device] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or (match[4] is not None and int(match[4]) < int(match[3])):
            example = "cuda:0-4, cuda:0,cuda:3 or cpu,cpu"
            raise ConfigError(f"devices such as {example}", repr(text), "correct the list", where=f"--{option}")
        if match[1]:
            found.append(torch.device("cpu"))
            continue
        first = int(match[3] or 0)
        found += [torch.device("cuda", index) for index in range(first, int(match[4] or first) + 1)]
    count = device_count() if any(device.type == "cuda" for device in found) else 0
    for device in found:
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ConfigError(
                f"one of this machine's {count} CUDA devices", str(device), "name others, or cpu", where=f"--{option}"
            )
    return tuple(found)


def spelled(several: tuple[torch.device, ...]) -> str:
    """Devices as they are written on the command line, runs of GPUs as a range."""
    parts: list[str] = []
    run: list[int] = []
    for device in (*several, None):
        if device is not None and device.type == "cuda" and (not run or device.index == run[-1] + 1):
            run.append(device.index)
            continue
        if run:
            parts.append(f"cuda:{run[0]}-{run[-1]}" if len(run) > 1 else f"cuda:{run[0]}")
            run = []
        if device is not None:
            run = [device.index] if device.type == "cuda" else []
            parts += [] if run else [str(device)]
    return ",".join(parts)


@dataclass(frozen=True)
class Layout:
    """Who computes which micro-batches of a step: micro-batch i belongs to drafter i mod (ranks * drafters).

    micro_batches: of a whole step, over all drafters of all ranks, so that the curve does not depend on how many there
    are. Drafters are counted rank by rank.
    """

    micro_batches: int
    drafters: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def own(self) -> list[int]:
        """This rank's micro-batches of a step, in order."""
        return [index for index in range(self.micro_batches) if self._owner(index) is not None]

    def drafter(self, number: int) -> int:
        """The drafter of this rank's micro-batch `number`, counted over all steps."""
        owner = self._owner(self.own[number % len(self.own)])
        assert owner is not None
        return owner

    def share(self, drafter: int) -> list[int]:
        """Places, among this rank's micro-batches of a step, of those that a drafter computes."""
        return [place for place in range(len(self.own)) if self.drafter(place) == drafter]

    def _owner(self, index: int) -> int | None:
        rank, drafter = divmod(index % (self.ranks * self.drafters), self.drafters)
        return drafter if rank == self.rank else None


def layout(micro_batches: int, drafters: int, rank: int, ranks: int) -> Layout:
    """The layout of a run; micro_batches 0: one for each drafter. ConfigError: a drafter would have nothing to do."""
    workers = drafters * ranks
    if 0 < micro_batches < workers:
        got = f"{micro_batches} for {workers}"
        remedy = f"set it to {workers} or a multiple, or use fewer drafters"
        raise ConfigError("a micro-batch a step for every drafter", got, remedy, where="--optim.accumulate")
    return Layout(micro_batches or workers, drafters, rank, ranks)
