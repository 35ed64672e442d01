"""Texts of JSON and TOML that Python's parsers answer with other errors than a ValueError."""

from collections.abc import Callable
from typing import Any

import pytest

from motet.core.config_loading import parse_value
from motet.core.errors import InputError
from motet.core.text_files import check_nesting, parse_json, parse_toml
from motet.train.job import load_job

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_json, f"[{DIGITS}]", "more than 4300 digits"),
        (parse_json, "[" * 200_000, "nested too deeply"),
        (parse_json, b'{"a": "\xff"}', "invalid start byte"),
        (parse_json, "[1", "Expecting"),
        (parse_toml, f"a = {DIGITS}", "more than 4300 digits"),
        (parse_toml, f"a = {'[' * 5000}", "nested too deeply"),
        (parse_toml, f"{'a.' * 5000}a = 1", "nested more than 64 deep"),
        (parse_toml, f"a = {'[' * 100}{']' * 100}", "nested more than 64 deep"),
        (parse_toml, "a = \x01", "Invalid"),
    ],
)
def test_whatever_is_wrong_is_a_value_error(parse: Callable[[Any], object], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        parse(text)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_what_is_right_is_read() -> None:
    assert parse_json(f'{{"a": {"9" * 4300}}}') == {"a": int("9" * 4300)} and parse_toml("a.b = [[1]]") == {
        "a": {"b": [[1]]}
    }
    nested: dict[str, Any] = {}
    for _ in range(63):
        nested = {"a": nested}
    check_nesting(nested)
    with pytest.raises(ValueError, match="nested more than 64"):
        check_nesting({"a": nested})


@pytest.mark.parametrize(
    "override",
    [
        f"run.steps={DIGITS}",
        f"run.steps=0x{'f' * 5000}",
        f"run.steps={'[' * 5000}",
        f"{'a.' * 5000}a=1",
        "run.steps=1e999",
    ],
)
def test_overrides_that_no_setting_can_hold(override: str) -> None:
    with pytest.raises(InputError) as raised:
        load_job("tiny", [override])
    assert len(str(raised.value)) < 11_000


def test_a_text_that_is_no_value_of_toml_is_a_text() -> None:
    assert parse_value(DIGITS) == DIGITS and parse_value("[" * 5000) == "[" * 5000


def test_a_sentence_cannot_change_the_terminal() -> None:
    assert str(InputError("no 'a\x7fb\x1b[2J\u202e'\nin it")) == "no 'a\\x7fb\\x1b[2J\\u202e'\nin it"
    assert str(InputError("no 'größer'")) == "no 'größer'"
