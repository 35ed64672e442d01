"""Numbers with units as people read them: bytes, counts and durations."""


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    return _scale(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def format_count(count: float) -> str:
    """4_212_736 -> '4.21 M'."""
    return _scale(count, 1000, ("", "K", "M", "B", "T"), " ").rstrip()


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


def _scale(count: float, base: int, names: tuple[str, ...], gap: str) -> str:
    scaled, at = float(count), 0
    # 999.5 would be printed as 1e+03: what rounds up to the next unit belongs to it.
    while abs(scaled) >= base * 0.9995 and at < len(names) - 1:
        scaled, at = scaled / base, at + 1
    digits = (
        f"{scaled:.0f}" if at == 0 and scaled == int(scaled) else f"{scaled:.3g}" if scaled < 1000 else f"{scaled:.0f}"
    )
    return f"{digits}{gap}{names[at]}"
