"""The words of a command that stand for a Program: `COLLECTIVE ALGORITHM [NAME=VALUE]...` or `FILE.json`."""

from pathlib import Path

from motet.cli.parse_sizes import MAX_RANKS, parse_dims, parse_integer
from motet.collectives.algorithms import algorithm_names, build
from motet.collectives.program import Program
from motet.core.errors import InputError, check_input


def parse_options(words: list[str]) -> dict[str, object]:
    """Parse options of an algorithm: `pieces=4 dims=4x4`."""
    options: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        check_input(equals and name, f"option {word!r} is not of the form NAME=VALUE, as in pieces=4 or dims=4x4")
        check_input(name not in options, f"option {name} is given twice, the second time as {word!r}; give it once")
        options[name] = parse_dims(value) if name == "dims" else parse_integer(name, value)
    return options


def names_program_file(words: list[str]) -> bool:
    """Whether the words name a file with a Program, not an algorithm."""
    return bool(words) and (words[0].endswith(".json") or "/" in words[0] or Path(words[0]).is_file())


def read_program(path: str) -> Program:
    """Read a Program from a JSON file."""
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {path}: {reason}; give a file that holds a Program") from None
    return Program.from_json(text, path)


def only_program_file(words: list[str]) -> str:
    """Return the file, which no option may follow."""
    if len(words) > 1:
        raise InputError(f"{words[1]!r} after {words[0]}, which is a file: its Program takes no options; leave it out")
    return words[0]


def load_or_build_program(words: list[str], ranks: int | None, default_ranks: int) -> Program:
    """Make the Program that the words stand for."""
    if names_program_file(words):
        loaded = read_program(only_program_file(words))
        message = f"--ranks {ranks}, but {words[0]} is a Program of {loaded.ranks} ranks; leave --ranks out"
        check_input(ranks in (None, loaded.ranks), message)
        return loaded
    collective, algorithm, options = split_algorithm_words(words)
    if algorithm is None:
        raise InputError(f"which algorithm of {collective}? There are {', '.join(algorithm_names(collective))}")
    count = default_ranks if ranks is None else ranks
    check_input(count <= MAX_RANKS, f"ranks {count}: give 2 to {MAX_RANKS}")
    return build(collective, algorithm, count, **options)


def split_algorithm_words(words: list[str]) -> tuple[str, str | None, dict[str, object]]:
    """The collective, the algorithm if the words name it, and its options."""
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise InputError(f"{names[2]!r} is one word too many; give COLLECTIVE ALGORITHM and options as in pieces=4")
    if not names:
        raise InputError(f"which collective? Give COLLECTIVE ALGORITHM before {words[0]!r}")
    return names[0], names[1] if len(names) > 1 else None, parse_options([word for word in words if "=" in word])
