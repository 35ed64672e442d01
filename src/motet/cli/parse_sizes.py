"""What people type in for numbers: `64MiB`, `1KiB..1GiB`, `2..64`, `4x4`, and algorithms with their options."""

import re
from pathlib import Path

from motet.cli.collectives.option_limits import MAX_RANKS
from motet.collectives.algorithms import algorithm_names, build
from motet.collectives.program import Program
from motet.core.errors import InputError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tb": 10**12,
    "tib": 2**40,
}


_MAX_SHOWN_CHARACTERS = 40  # Characters of a size that are told again


def parse_bytes(text: str) -> int:
    """64MiB, 1.5 GB, 4096 and 1e6 are numbers of bytes."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([a-z]*)", text.strip().lower())
    shown_text = repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}...")
    if not match or match[2] not in _UNITS:
        raise InputError(f"size {shown_text} is no number of bytes; write it as 64MiB, 1e6 or 4096")
    count = float(match[1]) * _UNITS[str(match[2])]
    if not 0.5 < count <= 2**60:
        size_text = "more than 2^60" if count > 2**60 else f"{count:.4g}"
        raise InputError(f"size {shown_text} is {size_text} bytes; give 1 to 2^60")
    return round(count)


def parse_size_range(text: str) -> list[int]:
    """`1KiB..1GiB` in steps of four, `1KiB,1MiB` these, `64MiB` this one."""
    first, dots, last = text.partition("..")
    if not dots:
        return sorted({parse_bytes(part) for part in text.split(",")})
    low, high = parse_bytes(first), parse_bytes(last)
    if low >= high:
        raise InputError(f"sizes {text}: the second must be larger than the first")
    steps = [low]
    while steps[-1] * 4 < high:
        steps.append(steps[-1] * 4)
    return [*steps, high]


def parse_rank_counts(text: str) -> list[int]:
    """Numbers of ranks: `2..64`, `4,8`, `7` or a mixture."""
    rank_counts: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        ends = [_parse_integer("ranks", end) for end in ((first, last) if dots else (first,))]
        if not 2 <= ends[0] <= ends[-1] <= MAX_RANKS:
            raise InputError(f"ranks {part}: give 2 to {MAX_RANKS}, the smaller number first, as in 2..64 or 4,8")
        rank_counts.update(range(ends[0], ends[-1] + 1))
    return sorted(rank_counts)


def parse_dims(text: str) -> tuple[int, ...]:
    """`4x4`"""
    return tuple(_parse_integer("dims", part) for part in text.split("x"))


def parse_options(words: list[str]) -> dict[str, object]:
    """`pieces=4 dims=4x4` as an algorithm takes them."""
    options: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InputError(f"option {word!r} is not of the form NAME=VALUE, as in pieces=4 or dims=4x4")
        if name in options:
            raise InputError(f"option {name} is given twice, the second time as {word!r}; give it once")
        options[name] = parse_dims(value) if name == "dims" else _parse_integer(name, value)
    return options


def _parse_integer(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise InputError(f"{name}: {text!r} is no whole number; write it as in {name}={'4x4' if name == 'dims' else 4}")
    return int(text)


def names_program_file(words: list[str]) -> bool:
    """Whether the words name a file with a Program, not an algorithm."""
    return bool(words) and (words[0].endswith(".json") or "/" in words[0] or Path(words[0]).is_file())


def read_program(path: str) -> Program:
    """The Program that a file holds."""

    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {path}: {reason}; give a file that holds a Program") from None
    return Program.from_json(text, path)


def only_program_file(words: list[str]) -> str:
    """The only word that may be there if the first one is a file."""
    if len(words) > 1:
        raise InputError(f"{words[1]!r} after {words[0]}, which is a file: its Program takes no options; leave it out")
    return words[0]


def load_or_build_program(words: list[str], ranks: int | None, default_ranks: int) -> Program:
    """The Program that `COLLECTIVE ALGORITHM [NAME=VALUE]...` or `FILE` stands for."""
    if names_program_file(words):
        loaded = read_program(only_program_file(words))
        if ranks not in (None, loaded.ranks):
            raise InputError(f"--ranks {ranks}, but {words[0]} is a Program of {loaded.ranks} ranks; leave --ranks out")
        return loaded
    collective, algorithm, options = split_algorithm_words(words)
    if algorithm is None:
        raise InputError(f"which algorithm of {collective}? There are {', '.join(algorithm_names(collective))}")
    count = default_ranks if ranks is None else ranks
    if count > MAX_RANKS:
        raise InputError(f"ranks {count}: give 2 to {MAX_RANKS}")
    return build(collective, algorithm, count, **options)


def split_algorithm_words(words: list[str]) -> tuple[str, str | None, dict[str, object]]:
    """The collective, the algorithm if one is named, and its options."""
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise InputError(f"{names[2]!r} is one word too many; give COLLECTIVE ALGORITHM and options as in pieces=4")
    if not names:
        raise InputError(f"which collective? Give COLLECTIVE ALGORITHM before {words[0]!r}")
    return names[0], names[1] if len(names) > 1 else None, parse_options([word for word in words if "=" in word])
