"""Formats are held against torch's conversions, value by value, and against the definition of rounding."""

import math
import random
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from motet.core.errors import InputError
from motet.precision.number_formats import NUMBER_FORMATS, NumberFormat, parse_exact_value

FORMATS = {each.name: each for each in NUMBER_FORMATS}
ROUNDED_BY_TORCH = ["FP32", "BF16", "FP16", "E4M3", "E5M2", "E8M0"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_of(form: NumberFormat) -> torch.dtype:
    dtype = getattr(torch, form.dtype or "")
    assert isinstance(dtype, torch.dtype)
    return dtype


def edge_values(form: NumberFormat) -> list[float]:
    """Around all borders of a format: each number is a float32, as conversions of torch start from it."""
    borders = [form.largest, form.smallest_normal, form.smallest_subnormal or 0.0, 1.0, 1.0 + form.epsilon]
    codes = random.Random(form.name).sample(range(form.largest_code), min(60, form.largest_code))
    numbers = [form.decode(code) for code in codes] + borders
    halves = [(a + b) / 2 for a, b in zip(sorted(numbers), sorted(numbers)[1:], strict=False)]
    between = [(form.decode(code) + form.decode(code + 1)) / 2 for code in codes]
    near = [x * (1 + sign * 2.0**-22) for x in between for sign in (1, -1)]
    return [0.0, *numbers, *halves, *between, *near, form.largest * (1 + form.epsilon / 4), 2 * form.largest]


@pytest.mark.parametrize("name", ROUNDED_BY_TORCH)
def test_values_and_bits_are_those_of_torch(name: str) -> None:
    form, generator = FORMATS[name], torch.Generator().manual_seed(3)
    exponents = torch.empty(4000).uniform_(-150, 128, generator=generator)
    middle = torch.empty(2000).uniform_(
        math.log2(form.smallest_normal) - 12, math.log2(form.largest), generator=generator
    )
    # float64 starts only the conversion to float32: torch rounds others twice.
    start = torch.float64 if name == "FP32" else torch.float32
    values = torch.cat([torch.exp2(exponents), torch.exp2(middle), torch.tensor(edge_values(form))]).to(start)
    if name == "FP32":
        values *= 1 + 2.0**-29 * torch.arange(len(values))
    values = torch.cat([values, -values, torch.tensor([math.inf, -math.inf, math.nan], dtype=start)])
    if not form.sign_bits:  # torch drops the sign, and rounds up whatever is above 2^-127 and subnormal in float32
        subnormal = (values > 2.0**-127) & (values < 2.0**-126)
        values = values[~torch.signbit(values) & ~subnormal]
    stored = values.to(dtype_of(form))
    bits = stored.view(BITS[stored.itemsize]).tolist()
    finite = 0
    for value, code, shown in zip(values.tolist(), bits, stored.double().tolist(), strict=True):
        ours, expected = form.encode(value), code % (1 << form.bits)
        assert ours is not None
        if math.isnan(value) or (name == "E4M3" and abs(value) > 464):  # torch saturates or not, by version
            assert math.isnan(form.decode(ours))
            assert math.isnan(shown) or form.encode(value, saturates=True) == expected
            continue
        assert ours == expected, (value, ours, expected)
        assert form.decode(ours) == shown or (math.isnan(shown) and math.isnan(form.decode(ours)))
        finite += 1
    assert finite > 5000


@pytest.mark.parametrize("form", [f for f in NUMBER_FORMATS if f.dtype and f.name not in ("E2M1", "FP64")])
def test_properties_are_those_of_finfo(form: NumberFormat) -> None:
    info = torch.finfo(dtype_of(form))
    assert (form.bits, form.largest, form.epsilon) == (info.bits, info.max, info.eps)
    assert form.smallest_normal == info.smallest_normal or form.name == "E8M0"


def test_float64_is_a_python_float() -> None:
    form, random_ = FORMATS["FP64"], random.Random(5)
    for value in [random_.uniform(-2, 2) * 2.0 ** random_.randint(-1074, 1000) for _ in range(500)] + [
        5e-324,
        math.inf,
    ]:
        assert form.encode(value) == struct.unpack("<Q", struct.pack("<d", value))[0]
    assert form.encode(Fraction(1, 3)) == struct.unpack("<Q", struct.pack("<d", 1 / 3))[0]


def test_tf32_rounds_the_bits_of_float32() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 1e-3
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13  # to nearest, halves to even
    assert [FORMATS["TF32"].encode(value) for value in values.tolist()] == rounded.tolist()


@pytest.mark.parametrize("name", ["E2M1", "E4M3", "E5M2", "FP16"])
def test_the_stored_value_is_the_nearest_of_all(name: str) -> None:
    form, random_ = FORMATS[name], random.Random(7)
    codes = range(form.largest_code + 1)
    numbers = [form.decode(code) for code in codes]
    for _ in range(60):
        value = random_.uniform(0, 1) * form.largest * 2.0 ** -random_.randint(0, form.bias)
        code = form.encode(Fraction(value))
        assert code is not None and abs(numbers[code] - value) == min(abs(each - value) for each in numbers)
    halves = [(a + b) / 2 for a, b in pairwise(numbers)]
    assert all((form.encode(half) or 0) % 2 == 0 for half in random_.sample(halves, min(300, len(halves))))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.3952", {"FP16": 0.395264, "BF16": 0.394531, "E4M3": 0.40625, "E5M2": 0.375}),
        ("0.395", {"FP16": 0.395020, "BF16": 0.394531, "E4M3": 0.40625, "E5M2": 0.375}),
    ],
)
def test_stored_values_of_a_known_example(value: str, expected: dict[str, float]) -> None:
    """The values of 0.3952 are those of the figure in NVIDIA's documentation of Transformer Engine."""
    codes = {name: FORMATS[name].encode(parse_exact_value(value)) for name in expected}
    assert {name: round(FORMATS[name].decode(code), 6) for name, code in codes.items() if code} == expected


def test_e2m1_has_eight_magnitudes_and_saturates() -> None:
    form = FORMATS["E2M1"]
    assert [form.decode(code) for code in range(8)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [form.encode(value) for value in (100.0, -math.inf, -0.5, math.nan)] == [7, 15, 9, None]


def test_overflow_is_as_the_format_says() -> None:
    def stored(name: str, value: float, *, saturates: bool = False) -> float:
        code = FORMATS[name].encode(value, saturates=saturates)
        assert code is not None
        return FORMATS[name].decode(code)

    assert stored("FP16", 65519.0) == 65504.0 and stored("FP16", 65520.0) == math.inf
    assert stored("E4M3", 464.0) == 448.0 and math.isnan(stored("E4M3", 465.0))
    assert stored("E4M3", -465.0, saturates=True) == -448.0 and stored("FP16", math.inf, saturates=True) == 65504.0
    assert math.isnan(stored("E8M0", -1.0)) and stored("E8M0", 0.0) == 2.0**-127


@pytest.mark.parametrize("text", ["", "0,395", "1e", "1e999999999", "1" * 900])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="give"):
        parse_exact_value(text)


def test_texts_are_read_exactly() -> None:
    assert parse_exact_value("0.395") == Fraction(395, 1000) and parse_exact_value(" -1e-3 ") == Fraction(-1, 1000)
    assert math.copysign(1, parse_exact_value("-0.0")) == -1 and math.isnan(parse_exact_value("nan"))
    assert parse_exact_value("-inf") == -math.inf
