"""The dtypes that motet knows, by name, so that the pure half can count bytes without torch."""

_NAMES = {
    16: "complex128",
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32 complex32",
    2: "bfloat16 float16 int16 uint16",
    1: "int8 uint8 bool float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
}
DTYPE_BYTES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype."""
    return str(dtype).removeprefix("torch.")
