"""Error feedback around any codec: the error of a step's message is added to the next step's tensor (arXiv:1901.09847).

The sum of all sent tensors is then the sum of all inputs, except for the error of the last step.
"""

import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import decode, encode, to_accumulation_dtype
from motet.collectives.compression.codec_base import Codec
from motet.collectives.compression.sparse_codecs import RandomKCodec
from motet.collectives.execute.api import RankGroupLike
from motet.core.errors import InputError, check_input
from motet.core.seeds import derive_seed


def message_seed(seed: int, name: str, step: int) -> int:
    """The seed with which a step's message for a tensor is encoded and decoded."""
    return derive_seed(seed, step, name)


class ErrorFeedback:
    """This rank's error of each tensor, by the tensor's name, and PowerSGD's bases.

    No rank applies a step whose total is not finite, so such a step does not change the errors.
    """

    def __init__(self, codec: Codec, seed: int) -> None:
        message = f"compression {codec}: error feedback would make its errors grow; use unbiased=false"
        check_input(not isinstance(codec, RandomKCodec) or not codec.unbiased, message)
        self.codec = codec
        self.seed = seed
        self.errors: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}

    def all_reduce(self, name: str, tensor: Tensor, ranks: RankGroupLike, step: int) -> Tensor:
        """The sum over the ranks, in the shape and dtype of `tensor`: the same bits on every rank."""
        corrected, rounded = self._add_error(name, tensor)
        seed, basis = message_seed(self.seed, name, step), self.bases.get(name)
        reduced = compressed_collectives.all_reduce(rounded, self.codec, ranks, seed, basis)
        self._store_error(name, corrected - to_accumulation_dtype(rounded) + reduced.error, reduced.total)
        if reduced.basis is not None:
            self.bases[name] = reduced.basis
        return reduced.total

    def encode(self, name: str, tensor: Tensor, step: int) -> Tensor:
        """A message that is decoded with `message_seed(self.seed, name, step)`."""
        corrected, rounded = self._add_error(name, tensor)
        seed = message_seed(self.seed, name, step)
        message = encode(self.codec, rounded, seed)
        sent = decode(self.codec, message, rounded.shape, rounded.dtype, seed)
        self._store_error(name, corrected - sent, sent)
        return message

    def state_dict(self) -> dict[str, Tensor]:
        """The state of this rank; it differs between ranks."""
        return {f"{kind}/{name}": tensor for kind, kept in self._state_by_kind() for name, tensor in kept.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for kind, kept in self._state_by_kind():
            kept.clear()
            kept.update({key.partition("/")[2]: t for key, t in state.items() if key.startswith(f"{kind}/")})
        unknown = state.keys() - self.state_dict().keys()
        if unknown:
            raise InputError(f"state of error feedback: {min(unknown)!r} is neither an error/ nor a basis/ of a tensor")

    def _state_by_kind(self) -> tuple[tuple[str, dict[str, Tensor]], ...]:
        return ("error", self.errors), ("basis", self.bases)

    def _add_error(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        tensor = tensor.detach()
        error = self.errors.setdefault(name, torch.zeros_like(to_accumulation_dtype(tensor)))
        shapes = f"the error of {name!r} has shape {list(error.shape)}, its tensor {list(tensor.shape)}"
        remedy = "start with no errors, or give each tensor its own name"
        check_input(error.shape == tensor.shape, f"error feedback: {shapes}; {remedy}")
        corrected = to_accumulation_dtype(tensor) + error
        return corrected, corrected.to(tensor.dtype)

    def _store_error(self, name: str, error: Tensor, total: Tensor) -> None:
        self.errors[name] = torch.where(total.isfinite().all(), error, self.errors[name])
