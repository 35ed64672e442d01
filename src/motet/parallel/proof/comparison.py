"""Comparison of the results of a module's parts with those of the whole module, in float64.

The line of a model's code at which a forward fails, and the numbers that it uses.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite, sqrt
from pathlib import Path
from textwrap import dedent
from types import TracebackType

import torch
from torch import Tensor, nn

import motet
from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.proof.proof_values import add_to_part

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


TOLERANCE = 1e-12  # Ratio of the norm of a difference to the norm of the whole
SMALL_GRADIENT = 1e-9  # Ratio of its norm to that of gradients of its size: it may be zero but for rounding


class ProofMismatchError(Exception):
    """Parts of a module compute other values than the whole; the text is a clause for the user."""

    def __init__(
        self,
        problem: str,
        *,
        module: str = "",
        tensor: str = "",
        distance: float | None = None,
        progress: int = 0,
        line: SourceLine | None = None,
    ) -> None:
        super().__init__(problem if distance is None else f"{problem}: relative difference {distance:.1e}")
        self.module, self.tensor, self.distance = module, tensor, distance  # Where it is, and how large
        self.progress = progress  # How far the comparison came
        self.line = line  # Line of the model's code that fails


def text_of_failure(error: Exception) -> str:
    """The words of an error of a module, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def distance(part: object, expected: Tensor, scale: float = 0.0, *, nan_is_equal: bool = False) -> float:
    """The norm of a difference, relative to the norm of the expected tensor, or to `scale` if this is larger.

    Infinities of the whole, such as masked scores, are equal or infinitely far away.
    """
    if not isinstance(part, Tensor) or part.shape != expected.shape or part.dtype != expected.dtype:
        return inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(part, expected) else inf
    part, expected = part.detach(), expected.detach()
    absolute, norm = float((part - expected).norm()), float(expected.norm())
    if not isfinite(absolute):
        is_equal = (part == expected) | (part.isnan() & expected.isnan() & nan_is_equal)
        absolute = float((part - expected).masked_fill(is_equal, 0).norm())
        norm = float(torch.where(expected.isfinite(), expected, 0).norm())
    if absolute == 0:
        return 0.0
    return absolute / max(norm, scale) if max(norm, scale) > 0 else inf


def is_close(part: object, expected: Tensor, scale: float = 0.0, *, nan_is_equal: bool = False) -> bool:
    """Whether something is a tensor that differs from another one by rounding alone."""
    return distance(part, expected, scale, nan_is_equal=nan_is_equal) <= TOLERANCE


def check_close(
    part: Tensor,
    expected: Tensor,
    problem: str,
    *,
    module: str = "",
    tensor: str = "",
    progress: int = 0,
    scale: float = 0.0,
) -> None:
    """Raise ProofMismatchError if two tensors differ by more than rounding."""
    relative = distance(part, expected, scale)
    if not relative <= TOLERANCE:
        raise ProofMismatchError(problem, module=module, tensor=tensor, distance=relative, progress=progress)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return reduce(torch.add, tensors)


def typical_size(gradients: Iterable[Tensor]) -> float:
    """The root mean square of all elements of gradients: rounding is measured against it, since some are zero."""
    tensors = list(gradients)
    numel = sum(gradient.numel() for gradient in tensors)
    return sqrt(sum(float(gradient.norm()) ** 2 for gradient in tensors) / max(1, numel))


@dataclass(frozen=True)
class GradientComparison:
    """The gradient of a tensor in the whole, with which those of its parts or copies are compared."""

    name: str
    expected: Tensor
    scale: float

    def check_parts(self, parts: Sequence[Tensor | None], split: DimensionSplit) -> None:
        """Check that the parts of ranks make up the gradient, and that padding has no gradient."""
        total = torch.zeros_like(self.expected)
        for rank, part in enumerate(parts):
            rest = None if part is None else add_to_part(total, part, split, ranks=len(parts), index=rank)
            if rest is not None and rest.any():
                raise ProofMismatchError(f"the padding of {self.name} has a gradient", tensor=self.name, progress=6)
        self.check(total, f"the gradients of the parts of {self.name} are not those of the whole")

    def has_partial_sums(self, copies: Sequence[Tensor | None]) -> bool | None:
        """Whether ranks have parts of its sum; None for a gradient that is zero. A copy may be neither part nor equal:
        that is a ProofMismatchError."""
        values = [torch.zeros_like(self.expected) if copy is None else copy for copy in copies]
        if all(is_close(value, self.expected, self.scale) for value in values):
            return False if float(self.expected.norm()) > SMALL_GRADIENT * self.scale else None
        problem = f"the gradients of {self.name} on shards are neither equal to that of the whole nor parts of its sum"
        self.check(sum_of(values), problem)
        return True

    def check(self, total: Tensor | None, problem: str) -> None:
        """Check a gradient that is complete; None is zero."""
        value = torch.zeros_like(self.expected) if total is None else total
        check_close(value, self.expected, problem, tensor=self.name, progress=6, scale=self.scale)


def gradient_comparisons(module: nn.Module, gradients: Mapping[str, Tensor]) -> Iterator[GradientComparison]:
    """The gradient of each trained parameter, which is zero if none of this name is known."""
    scale = typical_size(gradients.values())
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            expected = gradients.get(name, torch.zeros_like(parameter))
            yield GradientComparison(name, expected, scale * sqrt(expected.numel()))
