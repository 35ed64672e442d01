"""The number formats of deep learning, bit by bit: the bits of each, its range, and its rounding of a value.

All arithmetic is exact (fractions), so that a value is rounded once: to nearest, and to the even code between two.
"""

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal

from motet.core.errors import InputError, check_input

MAX_EXPONENT = 400  # Largest exponent of ten of a shown value; more is beyond every format


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format. `nan_codes` gives the bit patterns that are not numbers."""

    name: str
    dtype: str | None  # The name of torch's dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan_codes: Literal["largest exponent", "all ones", "none"]
    sign_bits: int = 1
    has_subnormals: bool = True
    remark: str = ""

    @property
    def bits(self) -> int:
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        return self.nan_codes == "largest exponent"

    @property
    def has_nan(self) -> bool:
        return self.nan_codes != "none"

    @property
    def smallest_exponent(self) -> int:
        """The exponent of the smallest normal number, and of subnormal ones."""
        return (1 if self.has_subnormals else 0) - self.bias

    @property
    def largest_code(self) -> int:
        """The code of the largest finite number, without its sign."""
        all_codes = 1 << (self.exponent_bits + self.mantissa_bits)
        reserved = {"largest exponent": 1 << self.mantissa_bits, "all ones": 1, "none": 0}
        return all_codes - reserved[self.nan_codes] - 1

    @property
    def largest(self) -> float:
        return self.decode(self.largest_code)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.smallest_exponent

    @property
    def smallest_subnormal(self) -> float | None:
        return 2.0 ** (self.smallest_exponent - self.mantissa_bits) if self.has_subnormals else None

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def overflow(self) -> str:
        """The result of rounding beyond the largest number, unless a conversion saturates."""
        return "infinity" if self.has_infinity else "NaN" if self.has_nan else "the largest number"

    def encode(self, value: Fraction | float, *, saturates: bool = False) -> int | None:
        """The bits that hold a value, rounded; None where nothing can hold it. A conversion that saturates gives the
        largest number instead of infinity or NaN."""
        if isinstance(value, float) and math.isnan(value):
            return self._nan_code
        sign = int(math.copysign(1.0, value) < 0) if isinstance(value, float) else int(value < 0)
        if sign and not self.sign_bits:
            return self._nan_code
        sign_code = sign << (self.exponent_bits + self.mantissa_bits)
        code = self.largest_code + 1
        if not (isinstance(value, float) and math.isinf(value)):
            code = self._magnitude_code(abs(Fraction(value)))
        if code <= self.largest_code or not self.has_nan or saturates:
            return sign_code | min(code, self.largest_code)
        return sign_code | self._infinity_code if self.has_infinity else self._nan_code

    def _magnitude_code(self, magnitude: Fraction) -> int:
        """The code of the nearest number if exponents had no end; of two that are equally near, the even one."""
        exponent = max(_floor_log2(magnitude), self.smallest_exponent) if magnitude else self.smallest_exponent
        steps = round(magnitude / Fraction(2) ** (exponent - self.mantissa_bits))  # Python rounds halves to even
        code = ((exponent - self.smallest_exponent) << self.mantissa_bits) + steps
        return code if self.has_subnormals else max(code - (1 << self.mantissa_bits), 0)

    def decode(self, code: int) -> float:
        """The value of bits; each format here fits into a Python float."""
        magnitude = code & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
        sign = -1.0 if code != magnitude else 1.0
        if magnitude > self.largest_code:
            return sign * math.inf if self.has_infinity and magnitude == self._infinity_code else math.nan
        field, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        is_normal = field > 0 or not self.has_subnormals
        steps = mantissa + ((1 << self.mantissa_bits) if is_normal else 0)
        return sign * math.ldexp(steps, max(field, 1 if self.has_subnormals else 0) - self.bias - self.mantissa_bits)

    def bit_fields(self, code: int) -> tuple[str, str, str]:
        """Sign, exponent and mantissa as digits."""
        digits = f"{code:0{self.bits}b}"
        stop = self.sign_bits + self.exponent_bits
        return digits[: self.sign_bits], digits[self.sign_bits : stop], digits[stop:]

    @property
    def _infinity_code(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def _nan_code(self) -> int | None:
        """A quiet NaN, as torch writes it."""
        if self.has_infinity:
            return self._infinity_code | (1 << (self.mantissa_bits - 1))
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 if self.has_nan else None


def _floor_log2(magnitude: Fraction) -> int:
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= magnitude else exponent - 1


NUMBER_FORMATS: tuple[NumberFormat, ...] = (
    NumberFormat("FP64", "float64", 11, 52, 1023, "largest exponent"),
    NumberFormat("FP32", "float32", 8, 23, 127, "largest exponent"),
    NumberFormat(
        "TF32",
        None,
        8,
        10,
        127,
        "largest exponent",
        remark="inputs of matmuls on NVIDIA's tensor cores, stored as FP32; products are added in FP32",
    ),
    NumberFormat("BF16", "bfloat16", 8, 7, 127, "largest exponent"),
    NumberFormat("FP16", "float16", 5, 10, 15, "largest exponent"),
    NumberFormat(
        "E4M3",
        "float8_e4m3fn",
        4,
        3,
        7,
        "all ones",
        remark="without infinity (OCP); conversions saturate or give NaN, by their implementation",
    ),
    NumberFormat("E5M2", "float8_e5m2", 5, 2, 15, "largest exponent"),
    NumberFormat("E2M1", "float4_e2m1fn_x2", 2, 1, 1, "none", remark="the elements of MXFP4 and NVFP4"),
    NumberFormat(
        "E8M0",
        "float8_e8m0fnu",
        8,
        0,
        127,
        "all ones",
        sign_bits=0,
        has_subnormals=False,
        remark="powers of two only: scales of blocks in MX formats; no zero and no negative number",
    ),
)


def parse_exact_value(text: str) -> Fraction | float:
    """The exact number of a text; nan, inf, and -0 are floats."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise InputError(f"--value {text!r} is not a number; give one such as 0.395, 6e-8, inf or nan") from None
    if not number.is_finite() or number.is_zero():
        return float(number)
    check_input(
        abs(number.adjusted()) <= MAX_EXPONENT and len(number.as_tuple().digits) <= 2 * MAX_EXPONENT,
        f"--value has the exponent {number.adjusted()} of ten and {len(number.as_tuple().digits)} digits, where "
        f"{MAX_EXPONENT} and {2 * MAX_EXPONENT} are the most; every format holds 0, its largest number or infinity "
        "there, so give a shorter number",
    )
    return Fraction(number)
