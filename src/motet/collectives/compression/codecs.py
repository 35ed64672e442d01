"""Codecs of messages: the base class, block-wise and sparse codecs, PowerSGD, and the names that settings use.

The interface of a codec: its options, the exact length of its messages, and its two directions.

A codec's file has all of the codec. Settings and plans use options and lengths without importing torch.

The codecs of a fixed number of bits per element, with a scale per block: int8, int4, sign and float8.

Integers: each element becomes the nearest level, or unbiased one of the two next to it at random. A code is 0 to 2n,
with n = 2**(bits - 1) - 1; code n is zero, codes 0 and 2n are the largest magnitude of the block. Two codes of int4
share a byte, the first one in its low half.

The codecs that send some of the elements: the largest ones, each with its index, or random ones.

A non-finite number counts as larger than all others, so that top-k sends at least one. Random indices follow from the
seed, so that only values travel; they may miss a non-finite number, so one such number makes all values NaN.

PowerSGD: a matrix M [rows, columns] as P Q', by one power iteration from Q of the previous training step.

P = orthonormal(M Q), Q = M' P. Both are linear in M except for the orthonormalisation, so that ranks sum them by two
all-reduces. P and Q are float32. A non-finite number makes all of the result NaN.

The table of codecs, by the names that settings use: `parse_codec("int8:block=256,rounding=stochastic")`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import ceil, prod
from statistics import NormalDist
from typing import Any, ClassVar, Literal, get_args

from motet.collectives.compression import lazy_torch as torch
from motet.core.errors import InputError, check_input
from motet.core.units import DTYPE_BYTES, dtype_name

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
                requirement = "a number above 0 and at most 1"
            else:
                continue
            raise InputError(f"compression {self.name}: {field.name} is {value}; give {requirement}")

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
        """The number of elements that are sent: at least one, unless the tensor is empty."""
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


@dataclass(frozen=True)
class IntegerCodec(BlockwiseCodec):
    """Each element becomes the index of a level between minus and plus the largest magnitude of its block."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    levels: Literal["uniform", "quantile"] = "uniform"

    @property
    def _max_level(self) -> int:
        return (1 << self.bits - 1) - 1

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        positions = self._level_positions(units) if self.levels == "quantile" else units * self._max_level
        if self.rounding == "stochastic":
            generator = torch.Generator(units.device).manual_seed(seed)
            positions = (positions + torch.rand(positions.shape, generator=generator, device=units.device)).floor_()
        codes = positions.round().clamp_(-self._max_level, self._max_level).add_(self._max_level).to(torch.uint8)
        if self.bits == 8:
            return codes
        pairs = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel]
        if self.levels == "quantile":
            return self._level_values(codes.device).index_select(0, codes.int())
        return (codes.to(torch.float32) - self._max_level) / self._max_level

    def _level_values(self, device: "torch.device") -> "torch.Tensor":
        return torch.tensor(quantile_levels(self.bits), dtype=torch.float32, device=device)

    def _level_positions(self, units: "torch.Tensor") -> "torch.Tensor":
        """Positions between the levels: 1.25 is a quarter of the way from level 1 to level 2 above zero."""
        levels = self._level_values(units.device)
        below = torch.bucketize(units, levels[1:-1], right=True)
        lower, upper = levels[below], levels[below + 1]
        return (units - lower) / (upper - lower) + (below - self._max_level)


@dataclass(frozen=True)
class Int8Codec(IntegerCodec):
    """Eight bits per element."""

    name = "int8"
    bits = 8


@dataclass(frozen=True)
class Int4Codec(IntegerCodec):
    """Four bits per element."""

    name = "int4"
    bits = 4
    block: int = 64


@cache
def quantile_levels(bits: int) -> tuple[float, ...]:
    """Levels that normally distributed numbers use equally often: odd in number, symmetric, from -1 over 0 to 1.

    They are the medians of 2**bits - 1 equally likely parts of the normal distribution.
    """
    half = 2 ** (bits - 1) - 1
    upper = [NormalDist().inv_cdf(0.5 + i / (2 * half + 1)) for i in range(1, half + 1)]
    upper = [level / upper[-1] for level in upper]
    return (*(-level for level in reversed(upper)), 0.0, *upper)


@dataclass(frozen=True)
class SignCodec(BlockwiseCodec):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024

    def scale_to_units(self, tensor: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        blocks = self.to_blocks(tensor)
        starts = torch.arange(len(blocks), device=blocks.device) * blocks.shape[1]
        lengths = (tensor.numel() - starts).clamp(max=blocks.shape[1]).view(-1, 1)
        scales = (blocks.abs() / lengths).sum(1, keepdim=True)  # divided first: the sum alone may overflow
        return tensor.reshape(-1), finite_or_nan(scales)

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        bits = (units >= 0).to(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        bits = codes.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=codes.device) & 1
        return bits.view(-1)[:numel].to(torch.float32) * 2 - 1


# Name of torch's dtype, and the largest finite number of the format.
_FORMATS = {"e4m3": ("float8_e4m3fn", 448.0), "e5m2": ("float8_e5m2", 57344.0)}


@dataclass(frozen=True)
class Float8Codec(BlockwiseCodec):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"

    def units_to_codes(self, units: "torch.Tensor", seed: int) -> "torch.Tensor":
        name, largest = _FORMATS[self.format]
        return (units * largest).to(getattr(torch, name)).view(torch.uint8)

    def codes_to_units(self, codes: "torch.Tensor", numel: int) -> "torch.Tensor":
        name, largest = _FORMATS[self.format]
        return codes.view(getattr(torch, name)).to(torch.float32) / largest


_INDEX_DTYPES = {2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class TopKCodec(SparseCodec):
    """The fraction `keep` of the elements that are largest in magnitude: an index and a value for each."""

    name = "topk"

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        numel = prod(shape)
        return self.kept_elements(numel) * (index_bytes(numel) + element_bytes(dtype))

    def select(self, tensor: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """(ascending indices, values) of the largest elements."""
        flat = tensor.reshape(-1)
        indices = flat.abs().topk(self.kept_elements(flat.numel()), sorted=False).indices.sort().values
        return indices, flat[indices]

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        return pack_sparse(*self.select(tensor), tensor.numel())

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        indices, values = unpack_sparse(message, prod(shape), dtype)
        return values.new_zeros(prod(shape)).index_add_(0, indices, values).view(tuple(shape))


def pack_sparse(indices: "torch.Tensor", values: "torch.Tensor", numel: int) -> "torch.Tensor":
    """The message: all indices, then all values."""
    # An index from 2**15 up wraps to a negative int16, and back in `unpack_sparse`.
    narrow = indices.to(getattr(torch, _INDEX_DTYPES[index_bytes(numel)]))
    return torch.cat([narrow.view(torch.uint8), values.contiguous().view(torch.uint8)])


def unpack_sparse(message: "torch.Tensor", numel: int, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor]":
    """(indices, values) of a message."""
    width = index_bytes(numel)
    end = message.numel() // (width + dtype.itemsize) * width
    indices = message[:end].clone().view(getattr(torch, _INDEX_DTYPES[width])).long()
    return indices & 0xFFFF if width == 2 else indices, message[end:].clone().view(dtype)


@dataclass(frozen=True)
class RandomKCodec(SparseCodec):
    """One element at random from each of k equal parts of the tensor. All ranks draw the same: only values travel.

    `unbiased` multiplies each value by the length of its part. With error feedback it has to be off: the error
    would be multiplied as well, and grow.
    """

    name = "randomk"
    unbiased: bool = True

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        return self.kept_elements(prod(shape)) * element_bytes(dtype)

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        flat = tensor.reshape(-1)
        indices, _ = self._draw_indices(flat.numel(), seed, tensor.device)
        return torch.where(flat.isfinite().all(), flat[indices], torch.nan).view(torch.uint8)

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        indices, lengths = self._draw_indices(prod(shape), seed, message.device)
        values = message.clone().view(dtype)
        values = values * lengths if self.unbiased else values
        return values.new_zeros(prod(shape)).index_add_(0, indices, values).view(tuple(shape))

    def _draw_indices(self, numel: int, seed: int, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
        """(ascending indices, lengths of the parts that they stand for), drawn on the CPU: the same for all devices."""
        kept = self.kept_elements(numel)
        bounds = torch.arange(kept + 1) * numel // max(kept, 1)
        lengths = bounds.diff()
        draws = torch.rand(kept, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (bounds[:-1] + (draws * lengths).long()).to(device), lengths.to(device)


@dataclass(frozen=True)
class PowerSGDCodec(Codec):
    """A matrix as the product of two thin ones (arXiv:1905.13727), or uncompressed if the product is not smaller."""

    name = "powersgd"
    rank: int = 4

    def factor_shape(self, shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
        """(rows, columns, rank), or None if the product is not smaller. The first dim gives the rows."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        is_smaller = rank * (rows + columns) * SCALE_BYTES < rows * columns * element_bytes(dtype)
        return (rows, columns, rank) if is_smaller else None

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        rows, columns, rank = self.factor_shape(shape, dtype) or (0, 0, 0)
        return rank * (rows + columns) * SCALE_BYTES if rank else prod(shape) * element_bytes(dtype)

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        factors = self.factor_shape(tensor.shape, dtype_name(tensor.dtype))
        if factors is None:
            return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        rows, columns, rank = factors
        matrix = as_matrix(tensor, rows, columns)
        left = orthonormalize(matrix @ initial_basis((columns, rank), seed, tensor.device))
        return torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).view(torch.uint8)

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        factors = self.factor_shape(shape, dtype_name(dtype))
        if factors is None:
            return message.clone().view(dtype).view(tuple(shape))
        rows, columns, rank = factors
        left, right = message.clone().view(torch.float32).split([rows * rank, columns * rank])
        product: torch.Tensor = left.view(rows, rank) @ right.view(columns, rank).T
        return product.view(tuple(shape)).to(dtype)


def as_matrix(tensor: "torch.Tensor", rows: int, columns: int) -> "torch.Tensor":
    """The tensor as a contiguous float32 matrix, since strides may decide the last bits of a product."""
    return tensor.reshape(rows, columns).to(torch.float32).contiguous()


def initial_basis(shape: tuple[int, int], seed: int, device: "torch.device") -> "torch.Tensor":
    """A random Q, drawn on the CPU: the same for all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(device)


def orthonormalize(tall: "torch.Tensor") -> "torch.Tensor":
    """Columns that span those of `tall`; all NaN if one of its elements is not finite."""
    finite = tall.isfinite()
    basis: torch.Tensor = torch.linalg.qr(torch.where(finite, tall, 0))[0]
    return torch.where(finite.all(), basis, torch.nan)


_KINDS: list[type[Codec]] = [Int8Codec, Int4Codec, Float8Codec, SignCodec, TopKCodec, RandomKCodec, PowerSGDCodec]
CODECS = {kind.name: kind for kind in _KINDS}


def parse_codec(text: str) -> Codec:
    """The codec of `name` or `name:option=value,option=value`."""
    name, _, option_text = text.strip().partition(":")
    codec_class = CODECS.get(name)
    if codec_class is None:
        raise InputError(f"compression {text!r}: there is no codec {name!r}; use one of {', '.join(CODECS)}")
    types = {field.name: field.type for field in fields(codec_class)}
    options: dict[str, Any] = {}
    for part in option_text.split(",") if option_text else ():
        option, _, value = (word.strip() for word in part.partition("="))
        problem = f"option {option!r} is unknown or given twice; {name} has {', '.join(types)}"
        check_input(option in types and option not in options, f"compression {text!r}: {problem}")
        parse_value, expected = _OPTION_PARSERS.get(types[option], (str, "a word"))
        try:
            options[option] = parse_value(value)
        except (ValueError, KeyError):
            raise InputError(f"compression {text!r}: {option} is {value!r}; give {expected}") from None
    return codec_class(**options)


_OPTION_PARSERS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda value: {"true": True, "false": False}[value.lower()], "true or false"),
}


def is_top_k_smaller(codec: TopKCodec, numel: int, dtype: str, *, world: int) -> bool:
    """Whether a rank sends fewer bytes in an all-gather of indices and values than in a ring all-reduce of all."""
    dense_bytes = 2 * (world - 1) * ceil(numel / world) * element_bytes(dtype)
    return (world - 1) * codec.wire_bytes([numel], dtype) < dense_bytes


def all_reduce_traffic(codec: Codec, shape: Sequence[int], dtype: str, world: int) -> dict[str, int]:
    """The bytes that `compressed_collectives.all_reduce` counts on a rank: those sent, or an all-reduce's tensor."""
    numel = prod(shape)
    if world == 1 or numel == 0:
        return {}
    if isinstance(codec, BlockwiseCodec):
        sent = (world - 1) * codec.wire_bytes([rank_slices(numel, world)[0][1]], dtype)
        return {"all_to_all_bytes": sent, "all_gather_bytes": sent}
    if isinstance(codec, TopKCodec):
        if is_top_k_smaller(codec, numel, dtype, world=world):
            return {"all_gather_bytes": (world - 1) * codec.wire_bytes(shape, dtype)}
        return {"all_reduce_bytes": numel * element_bytes(dtype)}
    return {"all_reduce_bytes": codec.wire_bytes(shape, dtype)}
