"""Writes plain nested values as TOML that reads back as the same values."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any


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
