"""Codecs as values: how a tensor is made small for the wire, and exactly how many bytes it has there.

A codec is written as text, too: `parse("int8:block=256,rounding=stochastic")`. motet.collectives.compression
encodes and decodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import ceil, prod
from statistics import NormalDist
from typing import Any, ClassVar, Literal, get_args

from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError

SCALE_BYTES = 4  # A block's scale, and an element of PowerSGD's factors: float32, whatever the dtype of the tensor

FLOAT8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}  # The largest finite number of each format

COMPRESSIBLE_DTYPES = ("float64", "float32", "bfloat16", "float16")  # What can be compressed


@dataclass(frozen=True)
class CodecOptions(ABC):
    """The options of a codec. `str` gives the text that `parse` reads."""

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
        """Length of the message that a tensor becomes."""


@dataclass(frozen=True)
class BlockwiseCodecOptions(CodecOptions):
    """So many bits per element, and a scale per block: the same bytes for every dtype and shape of so many elements."""

    bits: ClassVar[int]
    block: int = 256

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        element_bytes(dtype)
        numel = prod(shape)
        return ceil(numel / self.block) * SCALE_BYTES + ceil(numel * self.bits / 8)


@dataclass(frozen=True)
class IntegerCodecOptions(BlockwiseCodecOptions):
    """Each element becomes the number of a level between minus and plus the largest magnitude of its block."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    levels: Literal["uniform", "quantile"] = "uniform"


@dataclass(frozen=True)
class Int8CodecOptions(IntegerCodecOptions):
    name = "int8"
    bits = 8


@dataclass(frozen=True)
class Int4CodecOptions(IntegerCodecOptions):
    name = "int4"
    bits = 4
    block: int = 64


@dataclass(frozen=True)
class Float8CodecOptions(BlockwiseCodecOptions):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"


@dataclass(frozen=True)
class SignCodecOptions(BlockwiseCodecOptions):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024


@dataclass(frozen=True)
class _SparseCodecOptions(CodecOptions):
    keep: float = 0.01

    def kept_elements(self, numel: int) -> int:
        """How many elements are sent: one at least, where there is one."""
        return min(numel, max(1, round(self.keep * numel)))


@dataclass(frozen=True)
class TopKCodecOptions(_SparseCodecOptions):
    """The share `keep` of the elements that are largest in magnitude: an index and a value for each."""

    name = "topk"

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        numel = prod(shape)
        return self.kept_elements(numel) * (index_bytes(numel) + element_bytes(dtype))


@dataclass(frozen=True)
class RandomKCodecOptions(_SparseCodecOptions):
    """One element at random from each of k equal parts of the tensor. All ranks draw the same: only values travel.

    `unbiased` multiplies what arrives by the length of its part. With error feedback it has to be off: the error
    would be multiplied as well, and grow.
    """

    name = "randomk"
    unbiased: bool = True

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        return self.kept_elements(prod(shape)) * element_bytes(dtype)


@dataclass(frozen=True)
class PowerSGDCodecOptions(CodecOptions):
    """A matrix as the product of two thin ones (arXiv:1905.13727). What that does not make smaller travels as it is."""

    name = "powersgd"
    rank: int = 4

    def factor_shape(self, shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
        """(rows, columns, rank), or None where the product is not smaller. The first dim gives the rows."""
        if prod(shape) == 0 or len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) * SCALE_BYTES >= rows * columns * element_bytes(dtype):
            return None
        return rows, columns, rank

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        factor_shape = self.factor_shape(shape, dtype)
        if factor_shape is None:
            return prod(shape) * element_bytes(dtype)
        rows, columns, rank = factor_shape
        return rank * (rows + columns) * SCALE_BYTES


CODECS: dict[str, type[CodecOptions]] = {
    kind.name: kind
    for kind in (
        Int8CodecOptions,
        Int4CodecOptions,
        Float8CodecOptions,
        SignCodecOptions,
        TopKCodecOptions,
        RandomKCodecOptions,
        PowerSGDCodecOptions,
    )
}


def parse_codec(text: str) -> CodecOptions:
    """`name` or `name:option=value,option=value`."""
    name, _, option_text = text.strip().partition(":")
    codec_class = CODECS.get(name)
    if codec_class is None:
        raise InputError(f"compression {text!r}: there is no codec {name!r}; use one of {', '.join(CODECS)}")
    types = {field.name: field.type for field in fields(codec_class)}
    options: dict[str, Any] = {}
    for part in option_text.split(",") if option_text else ():
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in types or option in options:
            raise InputError(
                f"compression {text!r}: option {option!r} is unknown or given twice; {name} has {', '.join(types)}"
            )
        options[option] = _parse_option(text, option, value, types[option])
    return codec_class(**options)


_OPTION_PARSERS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda value: {"true": True, "false": False}[value.lower()], "true or false"),
}


def _parse_option(text: str, option: str, value: str, option_type: object) -> object:
    if option_type not in _OPTION_PARSERS:
        return value
    parse_value, expected = _OPTION_PARSERS[option_type]
    try:
        return parse_value(value)
    except (ValueError, KeyError):
        raise InputError(f"compression {text!r}: {option} is {value!r}; it must be {expected}") from None


def element_bytes(dtype: str) -> int:
    """Bytes of an element that can be compressed."""
    if dtype not in COMPRESSIBLE_DTYPES:
        raise InputError(
            f"a tensor of {dtype} cannot be compressed; convert it to {', '.join(COMPRESSIBLE_DTYPES)} first"
        )
    return DTYPE_BYTES[dtype]


def index_bytes(numel: int) -> int:
    """Bytes of an index into so many elements on the wire."""
    return 2 if numel <= 1 << 16 else 4 if numel <= 1 << 31 else 8


@cache
def quantile_levels(bits: int) -> tuple[float, ...]:
    """Levels that normally distributed numbers use equally often: odd in number, symmetric, from -1 over 0 to 1.

    They are the medians of 2**bits - 1 equally likely parts of the normal distribution.
    """
    half = 2 ** (bits - 1) - 1
    upper = [NormalDist().inv_cdf(0.5 + i / (2 * half + 1)) for i in range(1, half + 1)]
    upper = [level / upper[-1] for level in upper]
    return (*(-level for level in reversed(upper)), 0.0, *upper)


def rank_slices(numel: int, world: int) -> list[tuple[int, int]]:
    """The (start, stop) that each rank sums and sends around: equally long, but for the last ones."""
    length = ceil(numel / world)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(world)]


def ring_all_reduce_bytes(numel: int, dtype: str, world: int) -> int:
    """What a rank sends in a ring all-reduce."""
    return 2 * (world - 1) * ceil(numel / world) * element_bytes(dtype)


def sparse_all_gather_bytes(counts: Sequence[int], numel: int, dtype: str) -> int:
    """What a rank sends when all gather the elements of all: everyone's message is as long as the longest."""
    return (len(counts) - 1) * max(counts) * (index_bytes(numel) + element_bytes(dtype))


def is_sparse_smaller(counts: Sequence[int], numel: int, dtype: str) -> bool:
    """Whether indices and values are fewer bytes than the whole tensor; `counts`: elements of each rank."""
    return sparse_all_gather_bytes(counts, numel, dtype) < ring_all_reduce_bytes(numel, dtype, len(counts))


def all_reduce_traffic(codec: CodecOptions, shape: Sequence[int], dtype: str, world: int) -> dict[str, int]:
    """What codecs.reduce.all_reduce adds to the counters of the trace on each rank.

    Gather and exchange count what goes to other ranks; an all-reduce counts its tensor, as everywhere.
    """
    numel = prod(shape)
    if world == 1 or numel == 0:
        return {}
    if isinstance(codec, BlockwiseCodecOptions):
        sent = (world - 1) * codec.wire_bytes([rank_slices(numel, world)[0][1]], dtype)
        return {"all_to_all_bytes": sent, "all_gather_bytes": sent}
    if isinstance(codec, TopKCodecOptions):
        counts = [codec.kept_elements(numel)] * world
        if not is_sparse_smaller(counts, numel, dtype):
            return {"all_reduce_bytes": numel * element_bytes(dtype)}
        return {"all_gather_bytes": sparse_all_gather_bytes(counts, numel, dtype)}
    return {"all_reduce_bytes": codec.wire_bytes(shape, dtype)}
