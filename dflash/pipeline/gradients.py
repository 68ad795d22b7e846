"""Drafter replicas of one process: gradients summed into the first, its new weights given to the others."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.cuda import comm

Named = Mapping[str, nn.Parameter]


class Replicas:
    """Copies of one drafter; the first holds the masters and the optimizer, so that copies cannot drift apart.

    Each computes the gradient of its share's sum(w * l). Their sum, divided once by the step's sum(w), is the gradient
    one drafter gets from the whole batch. The order of the sum is fixed: replica 0, 1, 2, ...
    """

    def __init__(self, replicas: Sequence[Named]) -> None:
        """`replicas`: the trainable parameters of each copy, by the same names."""
        assert len({tuple(named) for named in replicas}) == 1, "replicas of one drafter"
        self._parameters = [list(named.values()) for named in replicas]
        places = [parameters[0].device for parameters in self._parameters]
        self.devices = places
        # torch's primitives want one GPU a copy; on a CPU, and for copies that share a GPU, plain sums do
        self.collective = len(places) > 1 and all(p.type == "cuda" for p in places) and len(set(places)) == len(places)

    def sum_gradients(self) -> None:
        """Adds the gradients of all copies into the first and drops the others' own.

        A copy that had nothing to train on has no gradient and adds nothing. Runs on each device's current stream.
        """
        if self.collective:
            self._sum_collectively()
        else:
            self._sum_in_order()
        for parameters in self._parameters[1:]:
            for parameter in parameters:
                parameter.grad = None

    def spread_weights(self) -> None:
        """Copies the first one's weights into all others."""
        if self.collective:
            tensors = [parameter.detach() for parameter in self._parameters[0]]
            places = [device.index for device in self.devices]
            copies = comm.broadcast_coalesced(tensors, places)  # type: ignore[no-untyped-call]
        else:
            copies = [[parameter.detach() for parameter in self._parameters[0]]] * len(self._parameters)
        with torch.no_grad():
            for parameters, new in zip(self._parameters[1:], copies[1:], strict=True):
                for parameter, value in zip(parameters, new, strict=True):
                    parameter.copy_(value)

    def _sum_in_order(self) -> None:
        for index, first in enumerate(self._parameters[0]):
            for parameters in self._parameters[1:]:
                gradient = parameters[index].grad
                if gradient is None:
                    continue
                moved = gradient.to(first.device)
                # the same two operations as autograd's own accumulation over micro-batches, so the same bits
                first.grad = moved.clone() if first.grad is None else first.grad + moved

    def _sum_collectively(self) -> None:
        if all(parameter.grad is None for parameters in self._parameters for parameter in parameters):
            return
        gradients = [[_gradient(parameter) for parameter in parameters] for parameters in self._parameters]
        root = self.devices[0].index
        total = comm.reduce_add_coalesced(gradients, root)  # type: ignore[no-untyped-call]
        for parameter, gradient in zip(self._parameters[0], total, strict=True):
            parameter.grad = gradient


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
