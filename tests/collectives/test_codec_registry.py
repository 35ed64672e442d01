"""Codecs as values: their text, their bytes, their choices, and what they say to bad input."""

from math import ceil
from statistics import NormalDist

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.collectives.compression.blockwise_codecs import Float8Codec, Int4Codec, Int8Codec, SignCodec, quantile_levels
from motet.collectives.compression.codec_base import Codec, index_bytes, rank_slices
from motet.collectives.compression.codec_registry import (
    CODECS,
    is_sparse_smaller,
    parse_codec,
    ring_all_reduce_bytes,
    sparse_all_gather_bytes,
)
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.compression.sparse_codecs import RandomKCodec, TopKCodec
from motet.core.errors import InputError


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("int8", Int8Codec()),
        ("int8:block=32,rounding=stochastic", Int8Codec(32, "stochastic")),
        (" int4: levels = quantile ", Int4Codec(levels="quantile")),
        ("float8:format=e5m2", Float8Codec(format="e5m2")),
        ("sign:block=7", SignCodec(7)),
        ("topk:keep=1e-3", TopKCodec(0.001)),
        ("randomk:unbiased=False", RandomKCodec(unbiased=False)),
        ("powersgd:rank=2", PowerSGDCodec(2)),
    ],
)
def test_text(text: str, codec: Codec) -> None:
    assert parse_codec(text) == codec
    assert parse_codec(str(codec)) == codec


def test_text_is_complete() -> None:
    assert str(Int8Codec()) == "int8:block=256,rounding=nearest,levels=uniform"
    assert [parse_codec(name).name for name in CODECS] == list(CODECS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int7", "compression 'int7': there is no codec 'int7'; use one of int8, int4, float8, sign, topk, "),
        ("", "there is no codec ''"),
        ("int8:size=3", "option 'size' is unknown or given twice; int8 has block, rounding, levels"),
        ("int8:block=3,block=4", "option 'block' is unknown or given twice"),
        ("int8:", None),
        ("int8:block=", "block is ''; it must be a whole number"),
        ("int8:block=2.5", "block is '2.5'; it must be a whole number"),
        ("int8:block=0", "compression int8: block is 0; it must be a whole number from 1 up"),
        ("int4:rounding=up", "compression int4: rounding is up; it must be nearest or stochastic"),
        ("float8:format=e3m4", "format is e3m4; it must be e4m3 or e5m2"),
        ("topk:keep=0", "keep is 0.0; it must be above 0 and at most 1"),
        ("topk:keep=1.1", "keep is 1.1; it must be above 0 and at most 1"),
        ("topk:keep=nan", "keep is nan; it must be above 0 and at most 1"),
        ("topk:keep=few", "keep is 'few'; it must be a number"),
        ("randomk:unbiased=1", "unbiased is '1'; it must be true or false"),
        ("powersgd:rank=-1", "rank is -1; it must be a whole number from 1 up"),
    ],
)
def test_bad_text(text: str, sentence: str | None) -> None:
    if sentence is None:
        assert parse_codec(text) == Int8Codec()
        return
    with pytest.raises(InputError) as raised:
        parse_codec(text)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("codec", "shape", "dtype", "expected"),
    [
        (Int8Codec(256), [1000], "float32", 4 * 4 + 1000),
        (Int8Codec(256), [], "float64", 4 + 1),
        (Int4Codec(64), [7, 11], "bfloat16", 2 * 4 + 39),
        (Float8Codec(256), [256], "float16", 4 + 256),
        (SignCodec(1024), [1025], "float32", 2 * 4 + 129),
        (TopKCodec(0.01), [1000], "float32", 10 * (2 + 4)),
        (TopKCodec(0.01), [100_000], "bfloat16", 1000 * (4 + 2)),
        (TopKCodec(0.01), [3], "float64", 2 + 8),
        (TopKCodec(0.07), [100], "float32", 7 * 6),
        (TopKCodec(1.0), [0], "float32", 0),
        (RandomKCodec(0.5), [9], "float16", 4 * 2),
        (PowerSGDCodec(2), [100, 5, 4], "float32", 2 * (100 + 20) * 4),
        (PowerSGDCodec(2), [100], "bfloat16", 200),
        (PowerSGDCodec(2), [4, 4], "float32", 64),
        (PowerSGDCodec(2), [100, 4], "bfloat16", 800),  # factors in float32 would be 832 bytes
        (PowerSGDCodec(2), [0, 4], "float32", 0),
    ],
)
def test_bytes(codec: Codec, shape: list[int], dtype: str, expected: int) -> None:
    assert codec.wire_bytes(shape, dtype) == expected


@pytest.mark.parametrize("codec", [parse_codec(name) for name in CODECS], ids=list(CODECS))
def test_unknown_dtypes_are_refused(codec: Codec) -> None:
    with pytest.raises(InputError, match=r"a tensor of int64 cannot be compressed; convert it to float64, float32, "):
        codec.wire_bytes([10], "int64")


def test_index_bytes() -> None:
    assert [index_bytes(numel) for numel in (1, 2**16, 2**16 + 1, 2**31, 2**31 + 1)] == [2, 2, 4, 4, 8]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantile_levels_are_used_equally_often(bits: int) -> None:
    levels = quantile_levels(bits)
    assert len(levels) == 2**bits - 1
    assert (levels[0], levels[len(levels) // 2], levels[-1]) == (-1.0, 0.0, 1.0)
    assert list(levels) == sorted(-level for level in levels)
    normal = NormalDist(sigma=1 / NormalDist().inv_cdf(1 - 0.5 / len(levels)))
    shares = [(i + 0.5) / len(levels) for i in range(len(levels))]
    assert [normal.cdf(level) for level in levels] == pytest.approx(shares)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices(numel: int, world: int) -> None:
    slices = rank_slices(numel, world)
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(numel))
    assert len(slices) == world
    assert max(stop - start for start, stop in slices) == slices[0][1] == ceil(numel / world)


@example([200, 200], 300)  # as many bytes
@given(st.lists(st.integers(0, 300), min_size=2, max_size=9), st.integers(300, 70_000))
def test_sparse_pays_when_it_sends_less(counts: list[int], numel: int) -> None:
    world, each = len(counts), 8 if numel > 2**16 else 6
    sparse, dense = (world - 1) * max(counts) * each, 2 * (world - 1) * ceil(numel / world) * 4
    assert sparse_all_gather_bytes(counts, numel, "float32") == sparse
    assert ring_all_reduce_bytes(numel, "float32", world) == dense
    assert is_sparse_smaller(counts, numel, "float32") == (sparse < dense)
