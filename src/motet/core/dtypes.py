"""The dtypes that motet knows, by name, so that the pure half can count bytes without torch."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "bool": 1,
}


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype."""
    return str(dtype).removeprefix("torch.")
