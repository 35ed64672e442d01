"""The table of codecs, by the names that settings use: `parse_codec("int8:block=256,rounding=stochastic")`."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from math import ceil, prod
from typing import Any

from motet.collectives.compression.blockwise_codecs import Float8Codec, Int4Codec, Int8Codec, SignCodec
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec, element_bytes, rank_slices
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.compression.sparse_codecs import RandomKCodec, TopKCodec
from motet.core.errors import InputError, check_input

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
            raise InputError(f"compression {text!r}: {option} is {value!r}; it must be {expected}") from None
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
