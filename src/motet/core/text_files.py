"""Text files: written completely or not at all, TOML that is written, and JSON and TOML of users that is read.

Files that are replaced completely or not at all, and files that are not links to others.

Writes plain nested values as TOML that reads back as the same values.

JSON and TOML from files of users. Python's parsers raise a RecursionError for values that are nested too deeply, and
another error for numbers of thousands of digits; here every mistake in a text is a ValueError.
"""

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Literal


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write all of the new content, or leave the file unchanged."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_without_links(partial, "wb") as file:
            while content:  # a full disk may take a part of it
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_without_links(path: Path, mode: Literal["wb", "ab", "a+b"]) -> FileIO:
    """Open a regular file for unbuffered writing. A symbolic link is refused, and its target unchanged."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        return descriptor

    return FileIO(str(path), mode, opener=opener)


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML in which tables are `[sections]` and a list, with its contents, is one line."""
    return "\n\n".join(_tables(tree, ())).strip() + "\n"


def _tables(tree: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    inner = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tree.items() if key not in inner]
    if path and (lines or not inner):  # a table of tables only needs no header
        lines.insert(0, f"[{'.'.join(map(_key, path))}]")
    inner_tables = [text for key, value in inner.items() for text in _tables(value, (*path, key))]
    return ["\n".join(lines), *inner_tables] if lines else inner_tables


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float() if math.isnan(value) or math.isinf(value):
            return str(value)
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case Mapping():
            return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
        case _:
            raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _string(text: str) -> str:
    # JSON's escapes are those of TOML, except for DEL, which TOML must escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


MAX_WHOLE_NUMBER = 2**63 - 1  # The limit of other programs and tensors; products of a few such numbers are floats
MAX_NESTING = 64  # Depth of tables in TOML, where dotted keys need no recursion to be read, but any use of them does


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
