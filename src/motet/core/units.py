"""Numbers with units in readable form: bytes, counts and durations.

The dtypes that motet knows, by name, so that the pure half can count bytes without torch.
"""


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    return _scale(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """4_212_736 -> '4.21 M'."""
    return _scale(count, 1000, ("", "K", "M", "B", "T")).rstrip()


def format_duration(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_seconds(seconds: float) -> str:
    """3.1e-6 -> '3.1 us', with three digits in every unit."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def _scale(count: float, base: int, names: tuple[str, ...]) -> str:
    scaled, power = float(count), 0
    # 999.5 would be printed as 1e+03, so it belongs to the next unit.
    while abs(scaled) >= base * 0.9995 and power < len(names) - 1:
        scaled, power = scaled / base, power + 1
    digits = f"{scaled:.0f}" if (power == 0 and scaled == int(scaled)) or scaled >= 1000 else f"{scaled:.3g}"
    return f"{digits} {names[power]}"


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
