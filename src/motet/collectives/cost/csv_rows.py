"""Reads files of published measurements: rows of text with one clear error for what cannot be read."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors

Row = Mapping[str, str]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    with (
        convert_os_errors(f"read {path}", "name a file that exists and can be read"),
        path.open(newline="", encoding="utf-8") as file,
    ):
        try:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"{path} is no CSV file: {error}; give a file with a header and rows") from error
    check_input(bool(rows), f"{path} has no rows; give a file with a header and at least one row")
    return rows


def check_columns(path: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Check that the file has all columns."""
    missing = [name for name in names if name not in rows[0]]
    check_input(not missing, f"{path} has no column {', '.join(missing)}; its columns are {', '.join(rows[0])}")


def number(row: Row, name: str) -> float:
    """The number in a column."""
    value = optional_number(row, name)
    if value is None:
        raise InputError(f"row {row.get('id', '')}: column {name} is empty; give a number")
    return value


def optional_number(row: Row, name: str) -> float | None:
    """The number in a column that may be empty; every number in these files is 0 or more, and finite."""
    text = row.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"row {row.get('id', '')}: {name} = {text!r} is not a number; give one") from error
    check_input(0 <= value < 1e18, f"row {row.get('id', '')}: {name} = {text} is out of range; give 0 to 1e18")
    return value


def count(row: Row, name: str, default: int | None = None) -> int:
    """A whole number of at least 1, or `default` where the column is empty."""
    value = optional_number(row, name)
    if value is None and default is not None:
        return default
    value = number(row, name)
    text = f"row {row.get('id', '')}: {name} = {row[name]}"
    check_input(value >= 1 and value == int(value), f"{text} is no count; give a whole number of at least 1")
    return int(value)
