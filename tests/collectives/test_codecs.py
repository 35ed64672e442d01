"""Tensors to messages and back: exact lengths, small errors, no bias where none is promised, nothing hidden."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from motet.collectives.compression.blockwise_codecs import Int4Codec, Int8Codec, SignCodec, quantile_levels
from motet.collectives.compression.byte_messages import decode, encode
from motet.collectives.compression.codec_base import Codec
from motet.collectives.compression.codec_registry import CODECS as KINDS
from motet.collectives.compression.codec_registry import parse_codec
from motet.collectives.compression.powersgd import PowerSGDCodec
from motet.collectives.compression.sparse_codecs import RandomKCodec, TopKCodec
from motet.core.errors import InputError

PAGE = Path(__file__).parents[2] / "docs/guide/compression.md"
TEXTS = [
    *("int8", "int8:block=3,rounding=stochastic", "int8:levels=quantile", "int8:rounding=stochastic,levels=quantile"),
    *("int4", "int4:block=7,rounding=stochastic", "int4:levels=quantile", "int4:rounding=stochastic,levels=quantile"),
    *("float8", "float8:format=e5m2,block=5", "sign", "sign:block=3", "topk", "topk:keep=1", "randomk:keep=0.3"),
    *("randomk:keep=0.3,unbiased=false", "powersgd:rank=1", "powersgd"),
]
CODECS = [pytest.param(parse_codec(text), id=text) for text in TEXTS]
SHAPES = [(), (0,), (1,), (2,), (3, 0), (257,), (9, 16), (3, 5, 7)]
WIDEST_8, WIDEST_4 = (1 - quantile_levels(bits)[-2] for bits in (8, 4))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def passed(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    """The tensor that arrives."""
    return decode(codec, encode(codec, tensor, seed), tensor.shape, tensor.dtype, seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_and_dtype(codec: Codec, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = normal(*shape).to(dtype)
    message = encode(codec, tensor, seed=1)
    assert message.numel() == codec.wire_bytes(shape, str(dtype).removeprefix("torch."))
    arrived = decode(codec, message, shape, dtype, seed=1)
    assert (arrived.shape, arrived.dtype) == (tensor.shape, dtype)
    assert arrived.isfinite().all()
    assert passed(codec, torch.zeros(shape, dtype=dtype)).eq(0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_strides_gradients_and_the_input_do_not_matter(codec: Codec) -> None:
    tensor = normal(32, 32)
    kept = tensor.clone()
    turned = tensor.T.contiguous().T.requires_grad_()
    message = encode(codec, tensor, seed=3)
    assert not message.requires_grad
    assert torch.equal(message, encode(codec, turned, seed=3))
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


def test_only_the_block_of_a_bad_number_is_lost() -> None:
    tensor = normal(30)
    tensor[12] = math.inf
    for codec in (Int8Codec(block=10), Int4Codec(block=10), SignCodec(block=10)):
        assert passed(codec, tensor).isnan().nonzero().flatten().tolist() == list(range(10, 20))


def test_a_float64_beyond_float32_is_not_hidden() -> None:
    tensor = torch.tensor([1.0, 1e300], dtype=torch.float64)
    assert passed(Int8Codec(), tensor).isnan().all()
    assert torch.equal(passed(TopKCodec(0.5), tensor), torch.tensor([0.0, 1e300], dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("text", ["int8", "int8:rounding=stochastic", "int4:levels=quantile", "float8", "sign"])
def test_sizes_at_the_edges_of_float32(text: str, size: float) -> None:
    arrived = passed(parse_codec(text), torch.tensor([size, -size, 0.0, size]))
    assert arrived[[0, 1, 3]].sign().tolist() == [1, -1, 1]
    assert arrived.abs().max() == pytest.approx(size * (0.75 if text == "sign" else 1), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("int8", 0.5 / 127),
        ("int8:rounding=stochastic", 1 / 127),
        ("int4", 0.5 / 7),
        ("int4:rounding=stochastic", 1 / 7),
        ("int8:levels=quantile", WIDEST_8 / 2),
        ("int4:levels=quantile", WIDEST_4 / 2),
    ],
)
def test_no_error_exceeds_a_level(text: str, limit: float) -> None:
    codec = parse_codec(text)
    assert isinstance(codec, Int8Codec | Int4Codec)
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
    errors = {
        levels: (passed(parse_codec(f"int4:levels={levels}"), tensor) - tensor).norm()
        for levels in ("uniform", "quantile")
    }
    assert errors["quantile"] < 0.95 * errors["uniform"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_numbers_arrive_as_they_are(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    every = every[every.isfinite()]
    codec = parse_codec(f"float8:format={'e4m3' if dtype == torch.float8_e4m3fn else 'e5m2'}")
    torch.testing.assert_close(passed(codec, every), every, rtol=1e-6, atol=0.0)


def test_sign_is_sign_times_mean() -> None:
    tensor = torch.tensor([1.0, -2.0, 3.0, -10.0, 0.0])
    assert passed(SignCodec(block=3), tensor).tolist() == [2.0, -2.0, 2.0, -5.0, 5.0]


def test_top_k_takes_the_largest_and_changes_nothing() -> None:
    tensor = torch.arange(70_000, dtype=torch.float64).sub_(20_000.25)
    arrived = passed(TopKCodec(keep=0.5), tensor)
    assert torch.equal(arrived, torch.where(tensor.abs() > 15_000, tensor, 0) * (arrived != 0))
    assert arrived.count_nonzero() == 35_000
    assert tensor.abs()[arrived == 0].max() < tensor.abs()[arrived != 0].min()
    short = torch.cat([torch.zeros(65_535), torch.tensor([7.0])])  # the last index that fits two bytes
    assert torch.equal(passed(TopKCodec(1e-9), short), short)


@pytest.mark.parametrize(
    "text", ["int8:rounding=stochastic", "int4:rounding=stochastic", "int4:rounding=stochastic,levels=quantile"]
)
def test_stochastic_rounding_has_no_bias(text: str) -> None:
    codec = parse_codec(text)
    tensor = normal(200)
    draws = torch.stack([passed(codec, tensor, seed) for seed in range(2000)]).double()
    away = (draws.mean(0) - tensor).abs()
    spread = draws.std(0) / math.sqrt(len(draws))
    assert (away < 5 * spread + 1e-6).all()
    nearest = (passed(parse_codec(text.replace("stochastic", "nearest")), tensor) - tensor).abs()
    assert (nearest > 10 * spread + 1e-6).float().mean() > 0.3  # the test would notice a bias


@pytest.mark.parametrize("keep", [0.1, 0.37, 1.0])
def test_random_k_has_no_bias(keep: float) -> None:
    tensor = normal(50)
    codec = RandomKCodec(keep)
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


def test_power_sgd_is_exact_up_to_its_rank() -> None:
    matrix = normal(30, 3) @ normal(3, 40, seed=1)
    for tensor in (matrix, matrix.view(30, 5, 8)):
        torch.testing.assert_close(passed(PowerSGDCodec(3), tensor), tensor, rtol=1e-4, atol=1e-4)
    lost = (passed(PowerSGDCodec(2), matrix) - matrix).norm() / matrix.norm()
    assert (torch.linalg.svdvals(matrix)[2] / matrix.norm()) <= lost < 1


def test_power_sgd_sends_what_it_cannot_make_smaller() -> None:
    for tensor in (normal(100), normal(4, 4), normal(7, 100).to(torch.bfloat16)):
        assert torch.equal(passed(PowerSGDCodec(4), tensor), tensor)


def test_the_guide_tells_bytes_and_losses() -> None:
    """The second, third and fourth column of the page's first table."""
    lines = PAGE.read_text(encoding="utf-8").split("For a tensor of")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert {parse_codec(row[0]).name for row in rows} == set(KINDS)
    draws = torch.empty(2, 1024, 1024).exponential_(generator=torch.Generator().manual_seed(1))
    for text, size, lost, lost_of_laplace, _ in rows:
        assert parse_codec(text).wire_bytes([1024, 1024], "float32") / 2**20 == pytest.approx(float(size), rel=2e-3), (
            text
        )
        for tensor, told in ((normal(1024, 1024), lost), (draws[0] - draws[1], lost_of_laplace)):
            assert ((passed(parse_codec(text), tensor) - tensor).norm() / tensor.norm()).item() == pytest.approx(
                float(told), rel=0.03
            ), text


def test_power_sgd_does_not_hide_an_overflow() -> None:
    assert not passed(PowerSGDCodec(1), torch.full((20, 20), 3e38)).isfinite().all()
    torch.testing.assert_close(passed(PowerSGDCodec(1), torch.full((20, 20), 1e15)), torch.full((20, 20), 1e15))


def test_integers_are_refused() -> None:
    with pytest.raises(InputError, match="a tensor of int32 cannot be compressed"):
        encode(Int8Codec(), torch.zeros(3, dtype=torch.int32))


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match="a message of another codec, shape or dtype"):
        decode(Int8Codec(), encode(Int8Codec(), torch.zeros(300)), (301,), torch.float32)
