"""Runs of a module as the whole and as each of its shards, one after another in one process, and their comparison.

A shard computes with its part of the split tensors. Where ranks would communicate, at the inputs of column layers and
the outputs of row layers, its run goes on with the value of the whole, and in backward with the gradient of the whole.
So every difference is found where it arises, and shards that agree with the whole there agree everywhere.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from motet.models.dropout_mask import RowSplit
from motet.models.layout_invariant_dropout import row_split
from motet.parallel.tensor_parallel.dropout_split import split_by_units
from motet.parallel.tensor_parallel.find_regions import Forward, ObservedForward
from motet.parallel.tensor_parallel.proof_values import local_part, local_values, tensors_in
from motet.parallel.tensor_parallel.shard_comparison import (
    RecordedRun,
    SiteKey,
    SplitMismatchError,
    check_equal,
    compare_gradients,
    compare_values,
)
from motet.parallel.tensor_parallel.split_proposals import SplitProposal


class _ForwardStoppedError(Exception):
    """All row layers of the regions have run."""


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


# Functions by which code comes to depend on values, so that shards may go another way than the whole for some inputs.
_COMPARISONS = {"gt", "__gt__", "ge", "__ge__", "lt", "__lt__", "le", "__le__", "eq", "__eq__", "ne", "__ne__", "sign"}
_COMPARISONS |= {"argmax", "argmin", "argsort", "sort", "topk"}
_COMPARISONS |= {"__bool__", "__float__", "__int__", "__index__", "item", "tolist"}


class _ComparisonObserver(TorchFunctionMode):
    """Refuses comparisons of a tensor that has its shape in the whole, but other values: a sum over a part."""

    def __init__(self, run: RecordedRun, whole_run: RecordedRun | None) -> None:
        super().__init__()
        self.compared, self.expected = run.compared, whole_run.compared if whole_run else None

    def __torch_function__(self, func: Callable[..., Any], types: Any, *arguments: Any) -> Any:
        args, kwargs = (*arguments, None)[:2]
        if getattr(func, "__name__", "") in _COMPARISONS:
            for tensor in args:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    self._compare(tensor.detach())
        return func(*args, **(kwargs or {}))

    def _compare(self, tensor: Tensor) -> None:
        index = len(self.compared)
        self.compared.append(tensor)
        if self.expected is not None:
            if index >= len(self.expected):
                raise SplitMismatchError("a branch depends on values that a shard does not have", 3)
            if self.expected[index].shape == tensor.shape:
                text = "a branch or comparison depends on values that a shard does not have"
                check_equal(tensor, self.expected[index], text, progress=3)


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
        parameters = dict(self.module.named_parameters())  # Tensors of blocks that are alike share their memory
        partial = {parameters[name].data_ptr() for name, value in is_partial.items() if value}
        without = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        alike = (name for name in without if name not in splits and parameters[name].data_ptr() in partial)
        return frozenset({*(name for name, value in is_partial.items() if value), *alike})

    def forget(self) -> None:
        """Drop what is kept of runs of the whole."""
        self._whole_runs.clear()

    def _local_values(self, proposals: Sequence[SplitProposal], rank: int) -> AbstractContextManager[None]:
        parameters, local = dict(self.module.named_parameters()), dict[str, Tensor]()
        parts = dict[object, Tensor]()  # Tensors that share their memory have one
        for proposal in proposals:
            for name, split in proposal.splits.items():
                key = parameters[name].data_ptr(), split
                if key not in parts:
                    parts[key] = local_part(parameters[name].detach(), split, ranks=self.degree, index=rank)
                local[name] = parts[key]
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
            with self.repeatable(), _ComparisonObserver(run, whole_run), ExitStack() as hooks:
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
