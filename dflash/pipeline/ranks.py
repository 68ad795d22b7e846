"""The processes of a run (`torchrun`): gradients and counts summed, decisions shared; alone, nothing is sent.

Gradients are summed after the backward pass, not by hooks inside it: a rank whose share had no valid anchor still takes
part, so it never hangs the others; and with accumulation the sum is sent once a step.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash.drafter.metrics import Metrics
from dflash.errors import ConfigError
from dflash.pipeline.counts import Counted

# elements a message: large enough for the wire, small beside the gradients themselves
BUCKET = 8 << 20
# a rank waits this long for another; evaluation and saving happen on rank 0 alone
TIMEOUT = timedelta(minutes=60)


class Ranks:
    """This process among `size`; rank 0 logs, evaluates and saves. Its methods are for all ranks at once."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """True in the process that writes."""
        return self.rank == 0

    def merge(self, counted: Counted, parameters: Sequence[nn.Parameter], slots: int) -> Counted:
        """Sums gradients and counts over the ranks; slots: K - 1. A rank without any gradient adds zeros."""
        merged = self.merge_counts(counted, parameters, slots)
        if self.size > 1 and merged.metrics is not None:
            self._sum_gradients(parameters)
        return merged

    def merge_counts(self, counted: Counted, parameters: Sequence[nn.Parameter], slots: int) -> Counted:
        """The same for gradients that are summed already, by the backward pass of a drafter split over the ranks."""
        return counted if self.size == 1 else self._sum_counts(counted, slots, parameters[0].device)

    def any(self, flag: bool) -> bool:
        """True for all when it is true for one. By way of the hosts: no GPU is waited for."""
        if self.size == 1:
            return flag
        value = torch.tensor([float(flag)])
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value.item())

    def wait(self) -> None:
        """Returns when every rank has come here."""
        self.any(False)

    def _sum_counts(self, counted: Counted, slots: int, device: torch.device) -> Counted:
        """One message of float64: integers up to 2**53 and the metrics' own sums stay exact."""
        metrics = zero_metrics(slots, device) if counted.metrics is None else counted.metrics
        parts = [getattr(metrics, field.name) for field in fields(Metrics)]
        head = [float(counted.metrics is not None), float(counted.tokens), float(counted.empty)]
        flat = torch.cat([torch.tensor(head, dtype=torch.float64, device=device), *(part.flatten() for part in parts)])
        dist.all_reduce(flat)
        found, tokens, empty = flat[: len(head)].tolist()
        pieces = torch.split(flat[len(head) :], [part.numel() for part in parts])
        summed = Metrics(*(piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)))
        return Counted(summed if found else None, int(tokens), int(empty))

    def _sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, piece in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def zero_metrics(slots: int, device: torch.device) -> Metrics:
    """Counts of nothing, for blocks of `slots` + 1 tokens."""
    by_slot = {"correct", "valid", "accepted", "reached"}
    shapes = [(slots,) if field.name in by_slot else () for field in fields(Metrics)]
    return Metrics(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun's environment names; makes the process group and destroys it on exit; per process."""
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield Ranks()
        return
    rank = _number("RANK", None)
    # gloo carries the tensors of a CPU, nccl those of a GPU
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


def local_device(default: torch.device) -> torch.device:
    """The GPU of this rank among those of its host; on a CPU, and alone, `default`."""
    if default.type != "cuda" or _number("WORLD_SIZE", 1) == 1:
        return default
    return torch.device("cuda", _number("LOCAL_RANK", 0))


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ConfigError("an integer", repr(text), "start with torchrun, or unset WORLD_SIZE", where=f"${name}")
    return int(text)
