"""Error feedback around any codec: what a step's message lost is added to what the next step sends (arXiv:1901.09847).

So the sum of all that was sent is the sum of all that was given, but for the error of the last step.
"""

import torch
from torch import Tensor

from motet.collectives.codecs import reduce
from motet.collectives.codecs.message import decode, encode
from motet.collectives.codecs.wire import wide
from motet.collectives.compress import Codec, RandomK
from motet.collectives.execute import Ranks
from motet.core.errors import InputError
from motet.core.seeds import derive_seed


def seed_of(seed: int, name: str, step: int) -> int:
    """By which the message about a tensor is encoded and decoded."""
    return derive_seed(seed, step, name)


class ErrorFeedback:
    """The error of each tensor, by name, as this rank keeps it; and PowerSGD's bases.

    A step whose total is not finite is one that nobody applies: it leaves the errors as they were, on every rank.
    """

    def __init__(self, codec: Codec, seed: int) -> None:
        if isinstance(codec, RandomK) and codec.unbiased:
            raise InputError(f"compression {codec}: error feedback would make its errors grow; use unbiased=false")
        self.codec = codec
        self.seed = seed
        self.errors: dict[str, Tensor] = {}
        self.bases: dict[str, Tensor] = {}

    def all_reduce(self, name: str, tensor: Tensor, ranks: Ranks, step: int) -> Tensor:
        """The sum over the ranks, of the shape and dtype of `tensor`; the same bits on all of them."""
        carried, given = self._carried(name, tensor)
        reduced = reduce.all_reduce(given, self.codec, ranks, self.seed_of(name, step), self.bases.get(name))
        self._keep(name, carried - wide(given) + reduced.error, reduced.total)
        if reduced.basis is not None:
            self.bases[name] = reduced.basis
        return reduced.total

    def encode(self, name: str, tensor: Tensor, step: int) -> Tensor:
        """The message of one rank alone; it is decoded with `seed_of(name, step)`."""
        carried, given = self._carried(name, tensor)
        message = encode(self.codec, given, self.seed_of(name, step))
        sent = decode(self.codec, message, given.shape, given.dtype, self.seed_of(name, step))
        self._keep(name, carried - sent, sent)
        return message

    def seed_of(self, name: str, step: int) -> int:
        return seed_of(self.seed, name, step)

    def state_dict(self) -> dict[str, Tensor]:
        """Every rank has a state of its own."""
        return {f"{kind}/{name}": tensor for kind, kept in self._kinds() for name, tensor in kept.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for kind, kept in self._kinds():
            kept.clear()
            kept.update({key.partition("/")[2]: t for key, t in state.items() if key.startswith(f"{kind}/")})
        unknown = state.keys() - self.state_dict().keys()
        if unknown:
            raise InputError(f"state of error feedback: {min(unknown)!r} is neither an error/ nor a basis/ of a tensor")

    def _kinds(self) -> tuple[tuple[str, dict[str, Tensor]], ...]:
        return ("error", self.errors), ("basis", self.bases)

    def _carried(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """(tensor and error together, the same in the dtype of the tensor)"""
        tensor = tensor.detach()
        error = self.errors.setdefault(name, torch.zeros_like(wide(tensor)))
        if error.shape != tensor.shape:
            raise InputError(
                f"error feedback: the error of {name!r} has shape {list(error.shape)}, its tensor "
                f"{list(tensor.shape)}; start with no errors, or give each tensor a name of its own"
            )
        carried = wide(tensor) + error
        return carried, carried.to(tensor.dtype)

    def _keep(self, name: str, error: Tensor, total: Tensor) -> None:
        self.errors[name] = torch.where(total.isfinite().all(), error, self.errors[name])
