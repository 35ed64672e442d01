"""Comparison of the runs of shards with that of the whole: what they read, what they add up, and all gradients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.tensor_parallel.proof_values import add_to_part

TOLERANCE = 1e-12  # Of the norm of a difference to the norm of the whole
SMALL_GRADIENT = 1e-9  # Of its norm to that of gradients of its size: it may be zero but for rounding
SiteKey = tuple[str, str, int]  # (layer, "input" or "output", calls of it before)


class SplitMismatchError(Exception):
    """Shards do not add up to the whole; the text is a clause for the user."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress  # How far the comparison came


@dataclass
class RecordedRun:
    """Tensors at the places where ranks communicate, and their gradients."""

    values: dict[SiteKey, Tensor] = field(default_factory=dict)  # What ranks read, or the sum of what they add
    gradients: dict[SiteKey, Tensor] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    compared: list[Tensor] = field(default_factory=list)  # Tensors on whose values a branch or a choice depends
    roots: list[Tensor] = field(default_factory=list)  # Where backward starts
    results: list[Tensor] = field(default_factory=list)  # Of the forward, unless it was stopped

    def run_backward(self) -> None:
        """Compute all gradients from random ones at the roots."""
        generator = torch.Generator().manual_seed(1)
        roots = [root for root in self.roots if root.requires_grad]
        gradients = [torch.randn(root.shape, dtype=root.dtype, generator=generator) for root in roots]
        names, inputs = zip(*((name, p) for name, p in self.parameters.items() if p.requires_grad), strict=True)
        if roots:
            computed = torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
            pairs = zip(names, computed, strict=True)
            self.parameter_gradients = {name: grad for name, grad in pairs if grad is not None}
        self.roots = []


def compare_values(runs: Sequence[RecordedRun], whole_run: RecordedRun) -> None:
    """Check what shards read, the sums of what they add, and their results."""
    for key, expected in whole_run.values.items():
        name, side, _ = key
        if any(key not in run.values for run in runs):
            raise SplitMismatchError(f"{name} is not called on every shard", 1)
        if side == "input":
            for run in runs:
                check_equal(run.values[key], expected, f"the input of {name} differs on a shard", progress=2)
        else:
            total = sum_of(run.values[key] for run in runs)
            text = f"the outputs of the shards of {name} do not add up to its output"
            check_equal(total, expected, text, progress=3)
    for run in runs:
        if [result.shape for result in run.results] != [result.shape for result in whole_run.results]:
            raise SplitMismatchError("the module's result has another shape on a shard", 4)
        for result, expected in zip(run.results, whole_run.results, strict=True):
            check_equal(result, expected, "the module's result depends on something that a shard changes", progress=4)


def compare_gradients(
    runs: Sequence[RecordedRun], whole_run: RecordedRun, splits: Mapping[str, DimensionSplit]
) -> dict[str, bool]:
    """Check all gradients; whole parameters that have any -> whether shards have parts of its sum."""
    for key, expected in whole_run.gradients.items():
        name, side, _ = key
        gradients = [run.gradients.get(key, torch.zeros_like(expected)) for run in runs]
        if side == "input":
            check_equal(sum_of(gradients), expected, f"the gradients of the input of {name} do not add up", progress=5)
        else:
            for gradient in gradients:
                check_equal(gradient, expected, f"the gradient of the output of {name} differs on a shard", progress=5)
    gradients_of_whole, is_partial = whole_run.parameter_gradients, dict[str, bool]()
    numel = sum(gradient.numel() for gradient in gradients_of_whole.values())
    typical = sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients_of_whole.values()) / max(1, numel))
    for name, parameter in whole_run.parameters.items():
        if parameter.requires_grad:
            expected = gradients_of_whole.get(name, torch.zeros_like(parameter))
            shards = [run.parameter_gradients.get(name) for run in runs]
            scale = typical * sqrt(expected.numel())  # Some gradients are zero but for rounding
            if name in splits:
                _compare_parts(name, shards, expected, split=splits[name], scale=scale)
            else:
                is_partial |= _compare_copies(name, shards, expected, scale=scale)
    return is_partial


def _compare_parts(
    name: str, shards: Sequence[Tensor | None], expected: Tensor, *, split: DimensionSplit, scale: float
) -> None:
    total = torch.zeros_like(expected)
    for rank, part in enumerate(shards):
        if part is not None:
            rest = add_to_part(total, part, split, ranks=len(shards), index=rank)
            check_equal(rest, torch.zeros_like(rest), f"the padding of {name} has a gradient", progress=6)
    text = f"the gradients of the parts of {name} are not those of the whole"
    check_equal(total, expected, text, progress=6, scale=scale)


def _compare_copies(name: str, shards: Sequence[Tensor | None], expected: Tensor, *, scale: float) -> dict[str, bool]:
    copies = [torch.zeros_like(expected) if shard is None else shard for shard in shards]
    is_equal = all(difference(copy, expected, scale) <= TOLERANCE for copy in copies)
    if not is_equal:
        text = f"the gradients of {name} on shards are neither equal to that of the whole nor parts of its sum"
        check_equal(sum_of(copies), expected, text, progress=6, scale=scale)
    return {name: not is_equal} if not is_equal or float(expected.norm()) > SMALL_GRADIENT * scale else {}


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return torch.stack(list(tensors)).sum(0)


def difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """The norm of a difference, relative to the norm of `b`, or to `scale` if this is larger."""
    distance = float((a - b).norm())
    if distance == 0:
        return 0.0
    largest = max(float(b.norm()), scale)
    return distance / largest if largest > 0 else inf


def check_equal(a: Tensor, b: Tensor, text: str, *, progress: int, scale: float = 0.0) -> None:
    relative = difference(a, b, scale)
    if not relative <= TOLERANCE:
        raise SplitMismatchError(f"{text}: relative difference {relative:.1e}", progress)
