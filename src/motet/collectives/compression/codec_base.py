"""The interface of a codec: its options, the exact length of its messages, and its two directions.

A codec's file has all of the codec. torch is imported inside the methods that need tensors, so that settings and plans
can use options and lengths without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil, prod
from typing import TYPE_CHECKING, ClassVar, get_args

from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError, check_input

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_BYTES = 4  # A block's scale, and an element of PowerSGD's factors: float32 for every dtype of the tensor

COMPRESSIBLE_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Codec(ABC):
    """A way to compress a tensor. `str` gives the text that `parse_codec` reads."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if choices and value not in choices:
                requirement = " or ".join(choices)
            elif field.type is int and value < 1:
                requirement = "a whole number from 1 up"
            elif field.type is float and not 0 < value <= 1:
                requirement = "above 0 and at most 1"
            else:
                continue
            raise InputError(f"compression {self.name}: {field.name} is {value}; it must be {requirement}")

    def __str__(self) -> str:
        options = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}:{options}".lower()

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Length of the message for a tensor."""

    @abstractmethod
    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        """The message of a tensor without gradient: flat uint8."""

    @abstractmethod
    def decode(self, message: "Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "Tensor":
        """The tensor of a message."""


@dataclass(frozen=True)
class BlockwiseCodec(Codec):
    """A fixed number of bits per element, and a scale per block: the length depends on the number of elements only."""

    bits: ClassVar[int]
    block: int = 256

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        element_bytes(dtype)
        numel = prod(shape)
        return ceil(numel / self.block) * SCALE_BYTES + ceil(numel * self.bits / 8)

    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        from motet.collectives.compression import block_scaling

        units, scales = block_scaling.scale_to_units(tensor, self.block)
        return block_scaling.pack_message(scales, self.units_to_codes(units, seed))

    def decode(self, message: "Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "Tensor":
        from motet.collectives.compression import block_scaling

        scales, codes = block_scaling.unpack_message(message, prod(shape), self.block)
        units = self.codes_to_units(codes, prod(shape))
        return block_scaling.multiply_by_scales(units, scales, self.block, shape, dtype)

    @abstractmethod
    def units_to_codes(self, units: "Tensor", seed: int) -> "Tensor":
        """Flat numbers from -1 to 1 as bytes."""

    @abstractmethod
    def codes_to_units(self, codes: "Tensor", numel: int) -> "Tensor":
        """The numbers of these bytes in float32."""


@dataclass(frozen=True)
class SparseCodec(Codec):
    """Only some of the elements are sent, in the tensor's dtype."""

    keep: float = 0.01

    def kept_elements(self, numel: int) -> int:
        """The number of elements that are sent: at least one of a tensor that has one."""
        return min(numel, max(1, round(self.keep * numel)))


def element_bytes(dtype: str) -> int:
    """Bytes of an element; an `InputError` if the dtype cannot be compressed."""
    check_input(
        dtype in COMPRESSIBLE_DTYPES,
        f"a tensor of {dtype} cannot be compressed; convert it to {', '.join(COMPRESSIBLE_DTYPES)} first",
    )
    return DTYPE_BYTES[dtype]


def index_bytes(numel: int) -> int:
    """Bytes of an index into `numel` elements on the wire."""
    return 2 if numel <= 1 << 16 else 4 if numel <= 1 << 31 else 8


def rank_slices(numel: int, world: int) -> list[tuple[int, int]]:
    """The (start, stop) that each rank sums and sends on: equally long, except for the last ones."""
    length = ceil(numel / world)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(world)]
