"""The line of a model's code at which a forward fails, and the numbers that it uses."""

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import TracebackType

import torch

import motet

_NOT_OF_MODELS = tuple(str(Path(package.__file__ or "").parent) for package in (torch, motet))
_LONGEST_TEXT = 120


@dataclass(frozen=True)
class SourceLine:
    """An expression in a line of code."""

    place: str  # Such as `model.py:12`
    text: str
    numbers: Mapping[str, int]  # Literals and global names in it -> their values
    local_numbers: Mapping[str, int]  # Local names in it -> their values


def failing_line(error: BaseException) -> SourceLine | None:
    """The innermost expression outside of torch and motet that raised an error; None if there is none."""
    for each in reversed(list(_tracebacks(error))):
        if each.tb_frame.f_code.co_filename.startswith(_NOT_OF_MODELS):
            continue
        code, frame = each.tb_frame.f_code, each.tb_frame
        if lines := linecache.getlines(code.co_filename, frame.f_globals):
            text = _text_at(lines, list(code.co_positions())[each.tb_lasti // 2])
            place = f"{Path(code.co_filename).name}:{each.tb_lineno}"
            numbers = dict(_numbers(text, {**frame.f_globals, **frame.f_locals}))
            local = {name: numbers.pop(name) for name in (*numbers,) if name in frame.f_locals}
            return SourceLine(place, " ".join(text.split())[:_LONGEST_TEXT], numbers, local)
    return None


def _tracebacks(error: BaseException) -> Iterator[TracebackType]:
    inner = error.__traceback__
    while inner is not None:
        yield inner
        inner = inner.tb_next


def _text_at(lines: Sequence[str], position: tuple[int | None, int | None, int | None, int | None]) -> str:
    """The source between two positions, or the first line where they are not known."""
    first, last, start, end = position
    if first is None or last is None or start is None or end is None:
        return lines[(first or 1) - 1].strip()
    picked = [line.encode() for line in lines[first - 1 : last]]
    picked[-1] = picked[-1][:end]
    picked[0] = picked[0][start:]
    return b"".join(picked).decode()


def _numbers(text: str, values: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    try:
        tree = ast.parse(f"({dedent(text)})")
    except SyntaxError:
        return
    for node in ast.walk(tree):
        value = values.get(node.id) if isinstance(node, ast.Name) else None
        value = node.value if isinstance(node, ast.Constant) else value
        if type(value) is int and value > 1:
            yield ast.unparse(node), value
