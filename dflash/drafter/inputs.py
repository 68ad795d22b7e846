"""The inputs of DFlashDrafter.forward, checked once where they come in: what is wrong in them is named."""

from torch import Tensor

from dflash.errors import DataError
from dflash.features import Features


def check_inputs(
    features: Features, input_ids: Tensor, loss_mask: Tensor, layers: int, head: tuple[int, int]
) -> Tensor:
    """The loss mask as bool [B, T]. Raises DataError for another shape, an id outside the vocabulary, or another mask.

    layers: target layers that are read; head: (V, H) of the target's embedding. Reads the ids back from their device.
    """
    vocabulary, width = head
    if input_ids.dim() != 2:
        raise DataError("input_ids [B, T]", str(list(input_ids.shape)), "add the batch dimension", where="input_ids")
    rows, tokens = input_ids.shape
    remedy = f"give the outputs of {layers} target layers, each {width} wide"
    _check_shape("all_hidden_states", features.hidden, (rows, tokens, layers, width), remedy)
    _check_shape("verifier_last_hidden", features.last, (rows, tokens, width), "give the target's last hidden states")
    _check_shape("loss_mask", loss_mask, (rows, tokens), "give one value a token")
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise DataError("integer token ids", str(input_ids.dtype), "pass input_ids.long()", where="input_ids")
    if input_ids.numel():
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= vocabulary:
            got = str(low if low < 0 else high)
            remedy = "use the target's own tokenizer, and its pad token for padding"
            raise DataError(f"token ids in 0..{vocabulary - 1}", got, remedy, where="input_ids")
    mask = loss_mask.bool()
    if mask is not loss_mask and bool((mask != loss_mask).any()):
        remedy = "mark the tokens that are trained on with 1; weights are not taken"
        raise DataError("a mask of bool, or of 0 and 1", "other values", remedy, where="loss_mask")
    return mask


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], remedy: str) -> None:
    if tuple(tensor.shape) != shape:
        raise DataError(f"a shape of {list(shape)}", str(list(tensor.shape)), remedy, where=name)
