"""Codecs as values: how a tensor is made small for the wire, and exactly how many bytes it has there.

A codec is written as text, too: `parse("int8:block=256,rounding=stochastic")`. motet.collectives.codecs
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

SCALE_BYTES = 4
"""A block's scale, and an element of PowerSGD's factors: float32, whatever the dtype of the tensor."""

FLOAT8_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
"""The largest finite number of each format."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What can be compressed."""


@dataclass(frozen=True)
class Codec(ABC):
    """The options of a codec. `str` gives the text that `parse` reads."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if choices and value not in choices:
                limit = " or ".join(choices)
            elif field.type is int and value < 1:
                limit = "a whole number from 1 up"
            elif field.type is float and not 0 < value <= 1:
                limit = "above 0 and at most 1"
            else:
                continue
            raise InputError(f"compression {self.name}: {field.name} is {value}; it must be {limit}")

    def __str__(self) -> str:
        options = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}:{options}".lower()

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Length of the message that a tensor becomes."""


@dataclass(frozen=True)
class Blockwise(Codec):
    """So many bits per element, and a scale per block: the same bytes for every dtype and shape of so many elements."""

    bits: ClassVar[int]
    block: int = 256

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        element_bytes(dtype)
        numel = prod(shape)
        return ceil(numel / self.block) * SCALE_BYTES + ceil(numel * self.bits / 8)


@dataclass(frozen=True)
class Integers(Blockwise):
    """Each element becomes the number of a level between minus and plus the largest magnitude of its block."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    levels: Literal["uniform", "quantile"] = "uniform"


@dataclass(frozen=True)
class Int8(Integers):
    name = "int8"
    bits = 8


@dataclass(frozen=True)
class Int4(Integers):
    name = "int4"
    bits = 4
    block: int = 64


@dataclass(frozen=True)
class Float8(Blockwise):
    """Scaled so that the largest magnitude of a block becomes the largest finite number of the format."""

    name = "float8"
    bits = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"


@dataclass(frozen=True)
class Sign(Blockwise):
    """The sign of each element; the scale is the mean magnitude of its block."""

    name = "sign"
    bits = 1
    block: int = 1024


@dataclass(frozen=True)
class _Some(Codec):
    keep: float = 0.01

    def kept(self, numel: int) -> int:
        """How many elements are sent: one at least, where there is one."""
        return min(numel, max(1, round(self.keep * numel)))


@dataclass(frozen=True)
class TopK(_Some):
    """The share `keep` of the elements that are largest in magnitude: an index and a value for each."""

    name = "topk"

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        numel = prod(shape)
        return self.kept(numel) * (index_bytes(numel) + element_bytes(dtype))


@dataclass(frozen=True)
class RandomK(_Some):
    """One element at random from each of k equal parts of the tensor. All ranks draw the same: only values travel.

    `unbiased` multiplies what arrives by the length of its part. With error feedback it has to be off: the error
    would be multiplied as well, and grow.
    """

    name = "randomk"
    unbiased: bool = True

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        return self.kept(prod(shape)) * element_bytes(dtype)


@dataclass(frozen=True)
class PowerSGD(Codec):
    """A matrix as the product of two thin ones (arXiv:1905.13727). What that does not make smaller travels as it is."""

    name = "powersgd"
    rank: int = 4

    def factors(self, shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
        """(rows, columns, rank), or None where the product is not smaller. The first dim gives the rows."""
        if prod(shape) == 0 or len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) * SCALE_BYTES >= rows * columns * element_bytes(dtype):
            return None
        return rows, columns, rank

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        factors = self.factors(shape, dtype)
        if factors is None:
            return prod(shape) * element_bytes(dtype)
        rows, columns, rank = factors
        return rank * (rows + columns) * SCALE_BYTES


CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Int8, Int4, Float8, Sign, TopK, RandomK, PowerSGD)}


def parse(text: str) -> Codec:
    """`name` or `name:option=value,option=value`."""
    name, _, rest = text.strip().partition(":")
    kind = CODECS.get(name)
    if kind is None:
        raise InputError(f"compression {text!r}: there is no codec {name!r}; use one of {', '.join(CODECS)}")
    types = {field.name: field.type for field in fields(kind)}
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in types or option in options:
            raise InputError(
                f"compression {text!r}: option {option!r} is unknown or given twice; {name} has {', '.join(types)}"
            )
        options[option] = _read(text, option, value, types[option])
    return kind(**options)


_READERS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda value: {"true": True, "false": False}[value.lower()], "true or false"),
}


def _read(text: str, option: str, value: str, kind: object) -> object:
    if kind not in _READERS:
        return value
    reader, wanted = _READERS[kind]
    try:
        return reader(value)
    except (ValueError, KeyError):
        raise InputError(f"compression {text!r}: {option} is {value!r}; it must be {wanted}") from None


def element_bytes(dtype: str) -> int:
    """Bytes of an element that can be compressed."""
    if dtype not in DTYPES:
        raise InputError(f"a tensor of {dtype} cannot be compressed; convert it to {', '.join(DTYPES)} first")
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


def slices(numel: int, world: int) -> list[tuple[int, int]]:
    """The (start, stop) that each rank sums and sends around: equally long, but for the last ones."""
    length = ceil(numel / world)
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(world)]


def dense_bytes(numel: int, dtype: str, world: int) -> int:
    """What a rank sends in a ring all-reduce."""
    return 2 * (world - 1) * ceil(numel / world) * element_bytes(dtype)


def sparse_bytes(counts: Sequence[int], numel: int, dtype: str) -> int:
    """What a rank sends when all gather the elements of all: everyone's message is as long as the longest."""
    return (len(counts) - 1) * max(counts) * (index_bytes(numel) + element_bytes(dtype))


def sparse_pays(counts: Sequence[int], numel: int, dtype: str) -> bool:
    """Whether indices and values are fewer bytes than the whole tensor; `counts`: elements of each rank."""
    return sparse_bytes(counts, numel, dtype) < dense_bytes(numel, dtype, len(counts))


def all_reduce_traffic(codec: Codec, shape: Sequence[int], dtype: str, world: int) -> dict[str, int]:
    """What codecs.reduce.all_reduce adds to the counters of the trace on each rank.

    Gather and exchange count what goes to other ranks; an all-reduce counts its tensor, as everywhere.
    """
    numel = prod(shape)
    if world == 1 or numel == 0:
        return {}
    if isinstance(codec, Blockwise):
        sent = (world - 1) * codec.wire_bytes([slices(numel, world)[0][1]], dtype)
        return {"all_to_all_bytes": sent, "all_gather_bytes": sent}
    if isinstance(codec, TopK):
        counts = [codec.kept(numel)] * world
        if not sparse_pays(counts, numel, dtype):
            return {"all_reduce_bytes": numel * element_bytes(dtype)}
        return {"all_gather_bytes": sparse_bytes(counts, numel, dtype)}
    return {"all_reduce_bytes": codec.wire_bytes(shape, dtype)}
