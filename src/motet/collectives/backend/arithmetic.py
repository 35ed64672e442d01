"""How contributions are joined: one function per reduction, and what dtypes it takes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.errors import InputError

Join = Callable[..., Tensor]

JOINS: dict[str, Join] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_LOW = (torch.float16, torch.bfloat16)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Reduction(NamedTuple):
    """A reduction of one dtype."""

    join: Join
    low: bool
    """More than two summands are added up in float32 and rounded once."""
    divisor: int
    """What to divide by in the end."""


def reduction(name: str, dtype: torch.dtype, ranks: int) -> Reduction:
    if name not in JOINS:
        raise InputError(f"reduction {name}: this backend knows {', '.join(JOINS)}")
    kind = "float" if dtype.is_floating_point or dtype.is_complex else "integer"
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise InputError(
            f"{name} of {_plain(dtype)}: float8 can be moved but not reduced; reduce in bfloat16 or float32"
        )
    if name == "avg" and kind == "integer":
        raise InputError(f"avg of {_plain(dtype)}: only floating-point numbers are averaged; use sum")
    if name in ("band", "bor", "bxor") and kind == "float":
        raise InputError(f"{name} of {_plain(dtype)}: only integers have bits to combine; use sum, product, min or max")
    if name in ("min", "max") and (dtype in _SIGNED or dtype.is_complex):
        raise InputError(f"{name} of {_plain(dtype)}: torch does not order these; use int64 or a floating-point dtype")
    return Reduction(JOINS[name], dtype in _LOW and name in ("sum", "avg", "product"), ranks if name == "avg" else 1)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in, for those that torch cannot add: the bits of sums are those of signed numbers."""
    return _SIGNED.get(dtype, dtype)


def join_all(how: Reduction, out: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
    """The parts in their order into `out`, which may be the first of them, and the result divided."""
    total = out
    if how.low and len(parts) > 2:
        total = how.join(parts[0].float(), parts[1])
    else:
        how.join(parts[0], parts[1], out=out)
    for part in parts[2:]:
        how.join(total, part, out=total)
    if divisor > 1:
        total.div_(divisor)
    if total is not out:
        out.copy_(total)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
