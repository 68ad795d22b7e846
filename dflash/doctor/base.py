"""A check's result, and what the checks look at: loaded once, when the first check asks for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from dflash.attention.base import AttentionBackend
from dflash.attention.select import choose
from dflash.config import TrainConfig
from dflash.data.documents import DocumentStore
from dflash.doctor.resident import resident_bytes
from dflash.drafter.model import DFlashDrafter
from dflash.errors import UserError
from dflash.parts import Parts, build, build_drafter, load_target, resolve_device, training_store
from dflash.target import Target

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor: what was found, and with warn and fail what to do about it."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.status == "pass") == (not self.remedy), "a remedy belongs to warn and fail, and only there"


class Subject:
    """What is checked. Every attribute is loaded when first asked for, and may raise a UserError."""

    def __init__(self, config: TrainConfig, *, measure: bool = True) -> None:
        """Nothing is read yet. measure: whether a few steps may be timed."""
        self.config, self.measure = config, measure
        # resident memory just after the parts were built: before any check has run a forward
        self.built_bytes: int | None = None

    @cached_property
    def device(self) -> torch.device:
        """Where the run would compute."""
        return resolve_device(self.config.device)

    @cached_property
    def attention(self) -> AttentionBackend:
        """Strategy and kernel as the run would choose them."""
        config = self.config
        return choose(config.attn_strategy, config.attn_kernel, self.device, scope=config.compile_scope)

    @cached_property
    def target(self) -> Target:
        """The frozen model, loaded."""
        return self._built.target if self._built else load_target(self.config.target, self.device)

    @cached_property
    def drafter(self) -> DFlashDrafter:
        """A fresh drafter bound to the target."""
        return self._built.drafter if self._built else build_drafter(self.config, self.target)

    @cached_property
    def store(self) -> DocumentStore:
        """The training documents, tokenised."""
        return self._built.store if self._built else training_store(self.config.data, self.target)

    @cached_property
    def parts(self) -> Parts:
        """All that the loop works with, built as the run builds it."""
        return self._built or self._build()

    @cached_property
    def _built(self) -> Parts | None:
        """The parts together, so that a large target is loaded once; none when some part of them is at fault."""
        try:
            return self._build()
        except UserError:
            return None

    def _build(self) -> Parts:
        data = replace(self.config.data, features="online")
        parts = build(replace(self.config, data=data))
        self.built_bytes = resident_bytes()
        return parts


Group = Callable[[Subject], Iterator[Check]]


def passed(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, "pass", found)


def warned(name: str, found: str, remedy: str) -> Check:
    """The run works, and could be better or may end badly."""
    return Check(name, "warn", found, remedy)


def failed(name: str, found: str, remedy: str) -> Check:
    """The run cannot work."""
    return Check(name, "fail", found, remedy)


def guarded(name: str, group: Group, subject: Subject) -> Iterator[Check]:
    """A group's checks; an error that a run would stop with becomes a failed check, and ends the group."""
    try:
        yield from group(subject)
    except UserError as error:
        place = f"{error.where}: " if error.where else ""
        yield failed(name, f"{place}expected {error.expected}, got {error.got}", error.remedy)
    except torch.OutOfMemoryError as error:
        yield failed(name, str(error).splitlines()[0], "take a larger device, or --target.dtype bfloat16")
