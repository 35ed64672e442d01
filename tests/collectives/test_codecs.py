"""Codecs: their text and exact lengths; tensors to messages and back, with small errors and nothing hidden."""

import math
import re
from math import ceil
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from motet.collectives.compression.codecs import CODECS as KINDS
from motet.collectives.compression.codecs import (
    Codec,
    Float8Codec,
    Int4Codec,
    Int8Codec,
    PowerSGDCodec,
    RandomKCodec,
    SignCodec,
    TopKCodec,
    index_bytes,
    is_top_k_smaller,
    parse_codec,
    quantile_levels,
    rank_slices,
)
from motet.collectives.compression.compressed_collectives import decode, encode
from motet.core.errors import InputError

PAGE = Path(__file__).parents[2] / "docs/guide/compression.md"
TEXTS = [
    *("int8", "int8:block=3,rounding=stochastic", "int8:levels=quantile", "int8:rounding=stochastic,levels=quantile"),
    *("int4", "int4:block=7,rounding=stochastic", "int4:levels=quantile", "int4:rounding=stochastic,levels=quantile"),
    *("float8", "float8:format=e5m2,block=5", "sign", "sign:block=3", "topk", "topk:keep=1", "randomk:keep=0.3"),
    *("randomk:keep=0.3,unbiased=false", "powersgd:rank=1", "powersgd"),
]
CODECS = [pytest.param(parse_codec(text), id=text) for text in TEXTS]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def passed(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    return decode(codec, encode(codec, tensor, seed), tensor.shape, tensor.dtype, seed)


def loss(codec: Codec, tensor: Tensor) -> float:
    return ((passed(codec, tensor) - tensor).norm() / tensor.norm()).item()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (3, 0), (257,), (9, 16), (3, 5, 7)], ids=str)
def test_any_shape_and_dtype(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = normal(*shape).to(dtype)
    message = encode(codec, tensor, seed=1)
    assert message.numel() == codec.wire_bytes(shape, str(dtype).removeprefix("torch."))
    arrived = decode(codec, message, shape, dtype, seed=1)
    assert (arrived.shape, arrived.dtype) == (tensor.shape, dtype)
    assert arrived.isfinite().all() and passed(codec, torch.zeros(shape, dtype=dtype)).eq(0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_strides_gradients_and_the_input_do_not_matter(codec: Codec) -> None:
    tensor = normal(32, 32)
    kept, turned = tensor.clone(), tensor.T.contiguous().T.requires_grad_()
    message = encode(codec, tensor, seed=3)
    assert not message.requires_grad and torch.equal(message, encode(codec, turned, seed=3))
    message.zero_()
    assert torch.equal(tensor, kept)
    strided = normal(32)[::2]
    assert torch.equal(passed(codec, strided), passed(codec, strided.clone()))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 100, 143])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite_stays_so(codec: Codec, bad: float, place: int, dtype: torch.dtype) -> None:
    tensor = normal(9, 16).to(dtype)
    tensor.view(-1)[place] = bad
    assert not passed(codec, tensor).isfinite().all()


def test_only_the_block_of_a_bad_number_is_lost_and_a_large_float64_is_not_hidden() -> None:
    tensor = normal(30)
    tensor[12] = math.inf
    for codec in (Int8Codec(block=10), Int4Codec(block=10), SignCodec(block=10)):
        assert passed(codec, tensor).isnan().nonzero().flatten().tolist() == list(range(10, 20))
    tensor = torch.tensor([1.0, 1e300], dtype=torch.float64)
    assert passed(Int8Codec(), tensor).isnan().all()
    assert torch.equal(passed(TopKCodec(0.5), tensor), torch.tensor([0.0, 1e300], dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("text", ["int8", "int8:rounding=stochastic", "int4:levels=quantile", "float8", "sign"])
def test_sizes_at_the_edges_of_float32(text: str, size: float) -> None:
    arrived = passed(parse_codec(text), torch.tensor([size, -size, 0.0, size]))
    assert arrived[[0, 1, 3]].sign().tolist() == [1, -1, 1]
    assert arrived.abs().max() == pytest.approx(size * (0.75 if text == "sign" else 1), rel=1e-3)


@pytest.mark.parametrize("option", ["rounding=nearest", "rounding=stochastic", "levels=quantile"])
@pytest.mark.parametrize(("bits", "positive"), [(8, 127), (4, 7)])
def test_no_error_exceeds_a_level(bits: int, positive: int, option: str) -> None:
    codec = parse_codec(f"int{bits}:{option}")
    assert isinstance(codec, Int8Codec | Int4Codec)
    widest = 1 - quantile_levels(bits)[-2] if "quantile" in option else 1 / positive
    limit = widest if "stochastic" in option else widest / 2
    tensor = normal(100, 64)
    blocks = tensor.view(-1, codec.block)
    errors = (passed(codec, tensor).view_as(blocks) - blocks).abs() / blocks.abs().amax(1, keepdim=True)
    assert limit / 2 < errors.max() <= limit * 1.0001


@pytest.mark.parametrize("bits", [8, 4])
def test_every_level_arrives_as_it_is(bits: int) -> None:
    uniform = torch.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)) / (2 ** (bits - 1) - 1)
    quantile = torch.tensor(quantile_levels(bits))
    for rounding in ("nearest", "stochastic"):
        for levels, exact in (("uniform", uniform), ("quantile", quantile)):
            codec = parse_codec(f"int{bits}:block=255,rounding={rounding},levels={levels}")
            torch.testing.assert_close(passed(codec, 3 * exact), 3 * exact, rtol=1e-6, atol=0.0)


def test_quantile_levels_suit_normal_numbers_in_four_bits() -> None:
    tensor = normal(64_000)
    assert loss(parse_codec("int4:levels=quantile"), tensor) < 0.95 * loss(parse_codec("int4"), tensor)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_numbers_arrive_as_they_are(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    every = every[every.isfinite()]
    codec = parse_codec(f"float8:format={'e4m3' if dtype == torch.float8_e4m3fn else 'e5m2'}")
    torch.testing.assert_close(passed(codec, every), every, rtol=1e-6, atol=0.0)


def test_sign_is_sign_times_mean_and_top_k_takes_the_largest() -> None:
    tensor = torch.tensor([1.0, -2.0, 3.0, -10.0, 0.0])
    assert passed(SignCodec(block=3), tensor).tolist() == [2.0, -2.0, 2.0, -5.0, 5.0]
    tensor = torch.arange(70_000, dtype=torch.float64).sub_(20_000.25)
    arrived = passed(TopKCodec(keep=0.5), tensor)
    assert torch.equal(arrived, torch.where(tensor.abs() > 15_000, tensor, 0) * (arrived != 0))
    assert arrived.count_nonzero() == 35_000 and tensor.abs()[arrived == 0].max() < tensor.abs()[arrived != 0].min()
    short = torch.cat([torch.zeros(65_535), torch.tensor([7.0])])  # the last index that fits two bytes
    assert torch.equal(passed(TopKCodec(1e-9), short), short)


@pytest.mark.parametrize(
    "text", ["int8:rounding=stochastic", "int4:rounding=stochastic", "int4:rounding=stochastic,levels=quantile"]
)
def test_stochastic_rounding_has_no_bias(text: str) -> None:
    codec, tensor = parse_codec(text), normal(200)
    draws = torch.stack([passed(codec, tensor, seed) for seed in range(2000)]).double()
    spread = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - tensor).abs() < 5 * spread + 1e-6).all()
    nearest = (passed(parse_codec(text.replace("stochastic", "nearest")), tensor) - tensor).abs()
    assert (nearest > 10 * spread + 1e-6).float().mean() > 0.3  # the test would notice a bias


@pytest.mark.parametrize("keep", [0.1, 0.37, 1.0])
def test_random_k_has_no_bias(keep: float) -> None:
    tensor, codec = normal(50), RandomKCodec(keep)
    draws = torch.stack([passed(codec, tensor, seed) for seed in range(4000)]).double()
    assert draws.count_nonzero(1).unique().tolist() == [round(keep * 50)]
    assert ((draws.mean(0) - tensor).abs() < 5 * draws.std(0) / math.sqrt(len(draws)) + 1e-6).all()
    as_it_is = passed(RandomKCodec(keep, unbiased=False), tensor)
    assert torch.equal(as_it_is, torch.where(as_it_is != 0, tensor, 0))


@pytest.mark.parametrize("codec", CODECS)
def test_the_seed_decides(codec: Codec) -> None:
    tensor = normal(40, 30)
    torch.manual_seed(1)
    first = encode(codec, tensor, seed=5)
    torch.manual_seed(2)
    assert torch.equal(first, encode(codec, tensor, seed=5))
    is_random = "stochastic" in str(codec) or codec.name in ("randomk", "powersgd")
    assert torch.equal(first, encode(codec, tensor, seed=6)) != is_random


def test_power_sgd_is_exact_up_to_its_rank_sends_what_is_not_smaller_and_hides_no_overflow() -> None:
    matrix = normal(30, 3) @ normal(3, 40, seed=1)
    for tensor in (matrix, matrix.view(30, 5, 8)):
        torch.testing.assert_close(passed(PowerSGDCodec(3), tensor), tensor, rtol=1e-4, atol=1e-4)
    assert (torch.linalg.svdvals(matrix)[2] / matrix.norm()) <= loss(PowerSGDCodec(2), matrix) < 1
    for tensor in (normal(100), normal(4, 4), normal(7, 100).to(torch.bfloat16)):
        assert torch.equal(passed(PowerSGDCodec(4), tensor), tensor)
    assert not passed(PowerSGDCodec(1), torch.full((20, 20), 3e38)).isfinite().all()
    torch.testing.assert_close(passed(PowerSGDCodec(1), torch.full((20, 20), 1e15)), torch.full((20, 20), 1e15))


def test_the_guide_tells_bytes_and_losses() -> None:
    """The second, third and fourth column of the page's first table."""
    lines = PAGE.read_text(encoding="utf-8").split("For a tensor of")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert {parse_codec(row[0]).name for row in rows} == set(KINDS)
    draws = torch.empty(2, 1024, 1024).exponential_(generator=torch.Generator().manual_seed(1))
    for text, size, lost, lost_of_laplace, _ in rows:
        codec = parse_codec(text)
        assert codec.wire_bytes([1024, 1024], "float32") / 2**20 == pytest.approx(float(size), rel=2e-3), text
        for tensor, told in ((normal(1024, 1024), lost), (draws[0] - draws[1], lost_of_laplace)):
            assert loss(codec, tensor) == pytest.approx(float(told), rel=0.03), text


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("int8", Int8Codec()),
        ("int8:", Int8Codec()),
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
    assert parse_codec(text) == codec == parse_codec(str(codec))


def test_text_is_complete_and_indices_have_their_bytes() -> None:
    assert str(Int8Codec()) == "int8:block=256,rounding=nearest,levels=uniform"
    assert [parse_codec(name).name for name in KINDS] == list(KINDS)
    assert [index_bytes(numel) for numel in (1, 2**16, 2**16 + 1, 2**31, 2**31 + 1)] == [2, 2, 4, 4, 8]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int7", "compression 'int7': there is no codec 'int7'; use one of int8, int4, float8, sign, topk, "),
        ("", "there is no codec ''"),
        ("int8:size=3", "option 'size' is unknown or given twice; int8 has block, rounding, levels"),
        ("int8:block=3,block=4", "option 'block' is unknown or given twice"),
        ("int8:block=", "block is ''; give a whole number"),
        ("int8:block=2.5", "block is '2.5'; give a whole number"),
        ("int8:block=0", "compression int8: block is 0; give a whole number from 1 up"),
        ("int4:rounding=up", "compression int4: rounding is up; give nearest or stochastic"),
        ("float8:format=e3m4", "format is e3m4; give e4m3 or e5m2"),
        ("topk:keep=0", "keep is 0.0; give a number above 0 and at most 1"),
        ("topk:keep=1.1", "keep is 1.1; give a number above 0 and at most 1"),
        ("topk:keep=nan", "keep is nan; give a number above 0 and at most 1"),
        ("topk:keep=few", "keep is 'few'; give a number"),
        ("randomk:unbiased=1", "unbiased is '1'; give true or false"),
        ("powersgd:rank=-1", "rank is -1; give a whole number from 1 up"),
    ],
)
def test_bad_text(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        parse_codec(text)


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


def test_unknown_dtypes_and_a_message_of_another_shape_are_refused() -> None:
    for name in KINDS:
        with pytest.raises(InputError, match="a tensor of int64 cannot be compressed; convert it to float64, float32"):
            parse_codec(name).wire_bytes([10], "int64")
    with pytest.raises(AssertionError, match="a message of another codec, shape or dtype"):
        decode(Int8Codec(), encode(Int8Codec(), torch.zeros(300)), (301,), torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantile_levels_are_used_equally_often(bits: int) -> None:
    levels = quantile_levels(bits)
    assert len(levels) == 2**bits - 1 and (levels[0], levels[len(levels) // 2], levels[-1]) == (-1.0, 0.0, 1.0)
    assert list(levels) == sorted(-level for level in levels)
    normal = NormalDist(sigma=1 / NormalDist().inv_cdf(1 - 0.5 / len(levels)))
    shares = [(i + 0.5) / len(levels) for i in range(len(levels))]
    assert [normal.cdf(level) for level in levels] == pytest.approx(shares)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices(numel: int, world: int) -> None:
    slices = rank_slices(numel, world)
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(numel)) and len(slices) == world
    assert max(stop - start for start, stop in slices) == slices[0][1] == ceil(numel / world)


@example(2, 200, 300)  # as many bytes
@given(st.integers(2, 9), st.integers(1, 300), st.integers(300, 70_000))
def test_sparse_pays_when_it_sends_less(world: int, kept: int, numel: int) -> None:
    each, codec = 8 if numel > 2**16 else 6, TopKCodec(kept / numel)
    sparse, dense = (world - 1) * kept * each, 2 * (world - 1) * ceil(numel / world) * 4
    assert is_top_k_smaller(codec, numel, "float32", world=world) == (sparse < dense)
