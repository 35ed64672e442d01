"""JSON and TOML from files of users. Python's parsers raise a RecursionError for values that are nested too deeply, and
another error for numbers of thousands of digits; here all that is wrong with a text is a ValueError."""

import json
import tomllib
from collections.abc import Callable
from typing import Any

MAX_WHOLE_NUMBER = 2**63 - 1  # What other programs and tensors hold; products of a few such numbers are still floats
MAX_NESTING = 64  # Of tables in TOML, where dotted keys need no recursion to be read, but any use of them does


def parse_json(text: str | bytes) -> Any:
    """The value of a text of JSON, or a ValueError in a few words."""
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a text of TOML, or a ValueError in a few words."""
    table: dict[str, Any] = _parse(tomllib.loads, text)
    check_nesting(table)
    return table


def check_nesting(table: dict[str, Any]) -> None:
    """Raise a ValueError for tables and lists that are nested more deeply than any setting is."""
    level: list[Any] = [table]
    for _ in range(MAX_NESTING):
        containers = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for values in containers for item in values if isinstance(item, dict | list)]
    if level:
        raise ValueError(f"its values are nested more than {MAX_NESTING} deep")


def _parse(parser: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parser(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("a whole number in it has more than 4300 digits") from None
        raise
