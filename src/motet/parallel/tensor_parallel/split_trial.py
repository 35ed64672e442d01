"""Runs of a module as the whole and as each of its shards, one after another in one process, and their comparison.

A shard computes with its part of the split tensors. Where ranks would communicate, at the inputs of column layers and
the outputs of row layers, its run goes on with the value of the whole, and in backward with the gradient of the whole.
So every difference is found where it arises, and shards that agree with the whole there agree everywhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.models.layout_invariant_dropout import row_split
from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.tensor_parallel.dropout_split import RowSplit, split_by_units
from motet.parallel.tensor_parallel.find_regions import Forward, ObservedForward
from motet.parallel.tensor_parallel.proof_values import add_to_part, local_part, local_values, tensors_in
from motet.parallel.tensor_parallel.split_proposals import SplitProposal

TOLERANCE = 1e-12  # Of the norm of a difference to the norm of the whole
SMALL_GRADIENT = 1e-9  # Of its norm to that of gradients of its size: it may be zero but for rounding
SiteKey = tuple[str, str, int]  # (layer, "input" or "output", calls of it before)


class SplitMismatchError(Exception):
    """Shards do not add up to the whole; the text is a clause for the user."""

    def __init__(self, text: str, progress: int) -> None:
        super().__init__(text)
        self.progress = progress  # How far the comparison came


class _ForwardStoppedError(Exception):
    """All row layers of the regions have run."""


@dataclass
class RecordedRun:
    """Tensors at the places where ranks communicate, and their gradients."""

    values: dict[SiteKey, Tensor] = field(default_factory=dict)  # What ranks read, or the sum of what they add
    gradients: dict[SiteKey, Tensor] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
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


@dataclass(frozen=True)
class _CommunicationSite:
    """A place where ranks would communicate, in one run."""

    key: SiteKey
    run: RecordedRun
    whole_run: RecordedRun | None  # None: the run is that of the whole


class _ReplaceByWhole(torch.autograd.Function):
    """The identity in the whole, which records the gradient; a shard goes on with what the whole has there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: _CommunicationSite) -> Tensor:
        ctx.site = site
        return (x if site.whole_run is None else site.whole_run.values[site.key]).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        site: _CommunicationSite = ctx.site
        site.run.gradients[site.key] = grad
        return grad if site.whole_run is None else site.whole_run.gradients[site.key], None


@dataclass
class SplitTrials:
    """A module with its forwards, and what was observed of each; ways to split it are compared with the whole."""

    module: nn.Module
    forwards: Sequence[tuple[Forward, ObservedForward]]
    degree: int
    repeatable: Callable[[], AbstractContextManager[object]]  # Inside, a forward draws the same random numbers
    _whole_runs: dict[object, RecordedRun] = field(default_factory=dict)

    def compare(self, proposals: Sequence[SplitProposal], *, stops: bool) -> frozenset[str]:
        """The names of whole parameters whose gradients are partial sums; raises SplitMismatchError.

        With `stops`, forwards end at the last row layer, where backward starts.
        """
        splits = {name: split for proposal in proposals for name, split in proposal.splits.items()}
        regions, is_partial = tuple(proposal.region for proposal in proposals), dict[str, bool]()
        for index in range(len(self.forwards)):
            whole_run = self._whole_runs.get((index, stops, regions))
            if whole_run is None:
                whole_run = self._run(index, proposals, stops=stops)
                whole_run.run_backward()
                self._whole_runs[index, stops, regions] = whole_run
            runs = []
            for rank in range(self.degree):
                with self._local_values(proposals, rank):
                    runs.append(self._run(index, proposals, stops=stops, rank=rank, whole_run=whole_run))
            compare_values(runs, whole_run)
            for run in runs:
                run.run_backward()
            for name, value in compare_gradients(runs, whole_run, splits).items():
                if is_partial.setdefault(name, value) != value:
                    raise SplitMismatchError(f"the gradient of {name} is a part of a sum at one length alone", 6)
        return frozenset(name for name, value in is_partial.items() if value)

    def forget(self) -> None:
        """Drop what is kept of runs of the whole."""
        self._whole_runs.clear()

    def _local_values(self, proposals: Sequence[SplitProposal], rank: int) -> AbstractContextManager[None]:
        parameters, local = dict(self.module.named_parameters()), dict[str, Tensor]()
        for proposal in proposals:
            for name, split in proposal.splits.items():
                local[name] = local_part(parameters[name].detach(), split, ranks=self.degree, index=rank)
            for row in proposal.region.rows:
                if rank > 0 and f"{row}.bias" in parameters:  # Rank 0 adds it
                    local[f"{row}.bias"] = torch.zeros_like(parameters[f"{row}.bias"])
        return local_values(self.module, local, [each for proposal in proposals for each in proposal.attributes])

    def _run(
        self,
        index: int,
        proposals: Sequence[SplitProposal],
        *,
        stops: bool,
        rank: int | None = None,
        whole_run: RecordedRun | None = None,
    ) -> RecordedRun:
        """Run one forward, as the whole or as the shard of a rank, whose values the module has."""
        run, (forward, observed) = RecordedRun(), self.forwards[index]
        rows = [observed.called[row] for proposal in proposals for row in proposal.region.rows]
        token = row_split.set(None)
        run.parameters = dict(self.module.named_parameters())
        row_calls = sum(rows) if stops else 0
        try:
            with self.repeatable(), ExitStack() as hooks:
                for proposal in proposals:
                    region_hooks = _RegionHooks(run, whole_run, observed, proposal, self.degree, rank, row_calls)
                    region_hooks.add(self.module, hooks)
                run.results = tensors_in(forward())
        except _ForwardStoppedError:
            pass
        finally:
            row_split.reset(token)
        run.roots, run.results = run.roots if stops else run.results, [result.detach() for result in run.results]
        return run


@dataclass
class _RegionHooks:
    """Hooks on the layers of one region in one forward."""

    run: RecordedRun
    whole_run: RecordedRun | None
    observed: ObservedForward
    proposal: SplitProposal
    ranks: int
    rank: int | None  # None: the whole
    row_calls: int  # After which the forward stops; 0: never
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # Tensors that column layers have read
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, module: nn.Module, hooks: ExitStack) -> None:
        """Add the hooks until `hooks` is closed."""
        for name in (name for group in self.proposal.region.columns for name in group):
            layer = module.get_submodule(name)
            hooks.callback(layer.register_forward_pre_hook(partial(self._enter_column, name)).remove)
        for name in self.proposal.region.rows:
            layer = module.get_submodule(name)
            hooks.callback(layer.register_forward_pre_hook(partial(self._enter_row, name)).remove)
            leave = lambda _, __, output, name=name: self._leave_row(name, output)  # noqa: E731  # as a hook is called
            hooks.callback(layer.register_forward_hook(leave).remove)

    def _enter_column(self, name: str, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.rank is not None:
            row_split.set(self._dropout_split(name))
        return (self._read(name, args[0]), *args[1:])

    def _dropout_split(self, column: str) -> RowSplit:
        """The part of activations that this rank has between a column layer and the next row layer."""
        order = [call.layer for call in self.observed.calls]
        row = next(name for name in order[order.index(column) :] if name in self.proposal.region.rows)
        width, split = self.observed.layers[row].in_width, self.proposal.input_splits[row]
        assert self.rank is not None
        return split_by_units(width, *split.local_spans(width, ranks=self.ranks, index=self.rank))

    def _enter_row(self, name: str, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        row_split.set(None)
        if self.proposal.region.columns:
            return None
        x = self._read(name, args[0])
        if self.rank is not None:
            x = local_part(x, self.proposal.input_splits[name], ranks=self.ranks, index=self.rank)
        return (x, *args[1:])

    def _leave_row(self, name: str, output: Tensor) -> Tensor:
        output = self._replace(output, name, "output")
        self.run.roots.append(output)
        if len(self.run.roots) == self.row_calls:
            raise _ForwardStoppedError
        return output

    def _read(self, name: str, x: Tensor) -> Tensor:
        """The input of a layer: ranks add its gradient, once for all layers that read the same tensor."""
        if id(x) not in self.inputs:
            self.inputs[id(x)] = x, self._replace(x, name, "input")
        return self.inputs[id(x)][1]

    def _replace(self, x: Tensor, name: str, side: str) -> Tensor:
        key = name, side, self.calls[name + side]
        self.calls[name + side] += 1
        self.run.values[key] = x.detach()
        if self.whole_run is not None:
            expected = self.whole_run.values.get(key)
            if expected is None or expected.shape != x.shape:
                sizes = f"{list(x.shape)} in place of {None if expected is None else list(expected.shape)}"
                raise SplitMismatchError(f"the {side} of {name} has another shape on a shard: {sizes}", 1)
        if not x.requires_grad:
            return x if self.whole_run is None else self.whole_run.values[key]
        return cast(Tensor, _ReplaceByWhole.apply(x, _CommunicationSite(key, self.run, self.whole_run)))  # type: ignore[no-untyped-call]  # untyped in torch


def compare_values(runs: Sequence[RecordedRun], whole_run: RecordedRun) -> None:
    """Check what shards read, the sums of what they add, and their results."""
    for key, expected in whole_run.values.items():
        name, side, _ = key
        if any(key not in run.values for run in runs):
            raise SplitMismatchError(f"{name} is not called on every shard", 1)
        if side == "input":
            for run in runs:
                _check_equal(run.values[key], expected, f"the input of {name} differs on a shard", progress=2)
        else:
            total = sum_of(run.values[key] for run in runs)
            text = f"the outputs of the shards of {name} do not add up to its output"
            _check_equal(total, expected, text, progress=3)
    for run in runs:
        if [result.shape for result in run.results] != [result.shape for result in whole_run.results]:
            raise SplitMismatchError("the module's result has another shape on a shard", 4)
        for result, expected in zip(run.results, whole_run.results, strict=True):
            _check_equal(result, expected, "the module's result depends on something that a shard changes", progress=4)


def compare_gradients(
    runs: Sequence[RecordedRun], whole_run: RecordedRun, splits: Mapping[str, DimensionSplit]
) -> dict[str, bool]:
    """Check all gradients; whole parameters that have any -> whether shards have parts of its sum."""
    for key, expected in whole_run.gradients.items():
        name, side, _ = key
        gradients = [run.gradients.get(key, torch.zeros_like(expected)) for run in runs]
        if side == "input":
            _check_equal(sum_of(gradients), expected, f"the gradients of the input of {name} do not add up", progress=5)
        else:
            for gradient in gradients:
                _check_equal(gradient, expected, f"the gradient of the output of {name} differs on a shard", progress=5)
    whole_gradients, is_partial = whole_run.parameter_gradients, dict[str, bool]()
    norm = sqrt(sum(float(g.norm()) ** 2 for g in whole_gradients.values()))
    norm /= sqrt(max(1, sum(g.numel() for g in whole_gradients.values())))
    for name, parameter in whole_run.parameters.items():
        shards = [run.parameter_gradients.get(name) for run in runs]
        expected = whole_gradients.get(name, torch.zeros_like(parameter))
        scale = norm * sqrt(expected.numel())
        if name in splits:
            total, text = torch.zeros_like(expected), f"the gradients of the parts of {name}"
            for rank, part in enumerate(shards):
                if part is not None:
                    rest = add_to_part(total, part, splits[name], ranks=len(runs), index=rank)
                    _check_equal(rest, torch.zeros_like(rest), f"the padding of {name} has a gradient", progress=6)
            _check_equal(total, expected, f"{text} are not those of the whole", progress=6, scale=scale)
            continue
        whole_shards = [torch.zeros_like(expected) if shard is None else shard for shard in shards]
        is_equal = all(difference(shard, expected, scale) <= TOLERANCE for shard in whole_shards)
        if not is_equal:
            text = f"the gradients of {name} on shards are neither equal to that of the whole nor parts of its sum"
            _check_equal(sum_of(whole_shards), expected, text, progress=6, scale=scale)
        if not is_equal or float(expected.norm()) > SMALL_GRADIENT * scale:
            is_partial[name] = not is_equal
    return is_partial


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


def _check_equal(a: Tensor, b: Tensor, text: str, *, progress: int, scale: float = 0.0) -> None:
    relative = difference(a, b, scale)
    if not relative <= TOLERANCE:
        raise SplitMismatchError(f"{text}: relative difference {relative:.1e}", progress)
