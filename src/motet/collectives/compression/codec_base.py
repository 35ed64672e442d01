"""The interface of a codec: its options, the exact length of its messages, and its two directions.

A codec's file has all of the codec. Settings and plans use options and lengths without importing torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil, prod
from typing import ClassVar, get_args

from motet.collectives.compression import lazy_torch as torch
from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError, check_input

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
    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        """The message of a tensor without gradient: flat uint8."""

    @abstractmethod
    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        """The tensor of a message. Numbers are read from a clone: a view must start at a multiple of their size."""


@dataclass(frozen=True)
class BlockwiseCodec(Codec):
    """A fixed number of bits per element, and a scale per block: the length depends on the number of elements only.

    A message holds the scales of all blocks as float32, then the codes of all elements. A block with a non-finite
    number gets the scale NaN, so that all of it arrives as NaN. A float64 beyond float32's range counts as non-finite.
    """

    bits: ClassVar[int]
    block: int = 256

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        element_bytes(dtype)
        numel = prod(shape)
        return ceil(numel / self.block) * SCALE_BYTES + ceil(numel * self.bits / 8)

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        units, scales = self.scale_to_units(tensor)
        return torch.cat([scales.reshape(-1).view(torch.uint8), self.units_to_codes(units, seed)])

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        numel = prod(shape)
        end = ceil(numel / self.block) * SCALE_BYTES
        scales = message[:end].clone().view(torch.float32).view(-1, 1)
        blocks = self.to_blocks(self.codes_to_units(message[end:], numel)) * scales
        return blocks.view(-1)[:numel].view(tuple(shape)).to(dtype)

    def to_blocks(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """[blocks, elements of a block] in float32; zeros fill up the last block."""
        flat = tensor.reshape(-1).to(torch.float32)
        block = min(self.block, max(flat.numel(), 1))
        return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)

    def scale_to_units(self, tensor: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """(flat elements over their block's largest magnitude, or 0 if that is 0 or NaN; these scales [blocks, 1])."""
        blocks = self.to_blocks(tensor)
        scales = finite_or_nan(blocks.abs().amax(1, keepdim=True))
        return torch.where(scales > 0, blocks / scales, 0).view(-1)[: tensor.numel()], scales

    @abstractmethod
    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        """Flat numbers from -1 to 1 as bytes."""

    @abstractmethod
    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        """The numbers of these bytes in float32."""


def finite_or_nan(scales: "torch.Tensor") -> "torch.Tensor":
    return torch.where(scales.isfinite(), scales, torch.nan)


@dataclass(frozen=True)
class SparseCodec(Codec):
    """Only some of the elements are sent, in the tensor's dtype."""

    keep: float = 0.01

    def kept_elements(self, numel: int) -> int:
        """The number of elements that are sent: at least one of a tensor that has one."""
        return min(numel, max(1, round(self.keep * numel)))


def element_bytes(dtype: str) -> int:
    """Bytes of an element; an `InputError` if the dtype cannot be compressed."""
    names = ", ".join(COMPRESSIBLE_DTYPES)
    check_input(dtype in COMPRESSIBLE_DTYPES, f"a tensor of {dtype} cannot be compressed; convert it to {names} first")
    return DTYPE_BYTES[dtype]


def index_bytes(numel: int) -> int:
    """Bytes of an index into `numel` elements on the wire."""
    return 2 if numel <= 1 << 16 else 4 if numel <= 1 << 31 else 8


def rank_slices(numel: int, world: int) -> list[tuple[int, int]]:
    """The (start, stop) that each rank sums and sends on: equally long, except for the last ones."""
    length = ceil(numel / world)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(world)]
