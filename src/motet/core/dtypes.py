"""The dtypes that motet knows, by name, so that the pure half can count bytes without torch."""

_NAMES = {8: "float64 int64", 4: "float32 int32 uint32", 2: "bfloat16 float16 int16 uint16", 1: "int8 uint8 bool"}
DTYPE_BYTES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype."""
    return str(dtype).removeprefix("torch.")
