"""How much of the data the target would have said itself: a drafter learns the target, not the author of the data.

Regenerated answers (`dflash prepare --regenerate`) give a share near 1; answers by people or other models far less, and
then acceptance suffers however long the training (arXiv 2602.06036, section 4.1).
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, Protocol

import torch

from dflash.errors import DataError
from dflash.target import Target


class Supervised(Protocol):
    """The part of data.documents.Document that is read here: token ids [T] and the mask of supervised ones [T]."""

    @property
    def input_ids(self) -> Any:
        """[T] integers."""
        ...

    @property
    def loss_mask(self) -> Any:
        """[T] bool."""
        ...


def target_agreement(target: Target, documents: Iterable[Supervised], limit: int = 32) -> float:
    """Share of the supervised tokens of the first `limit` documents that are the target's own greedy choice, 0..1."""
    same = total = 0
    for document in islice(documents, limit):
        ids = torch.tensor(document.input_ids, dtype=torch.long, device=target.device)
        counted = torch.tensor(document.loss_mask, dtype=torch.bool, device=target.device)[1:]
        if not bool(counted.any()):
            continue
        last = target.features(ids, [0]).last[:-1][counted]
        same += int((target.logits(last).argmax(-1) == ids[1:][counted]).sum())
        total += int(counted.sum())
    if total == 0:
        raise DataError("supervised tokens", "none in the documents looked at", "check the loss mask with --preview")
    return same / total
