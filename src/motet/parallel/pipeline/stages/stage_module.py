"""Stages of a pipeline as parts of a module's own forward, on its instances and without a change of its code.

A stage runs the whole forward. Blocks before the stage are skipped: they return tensors of NaN. At the first block of
the stage, received tensors replace the arguments that are wires. At the first block after it the forward ends: the
arguments there are the tensors that the stage sends. Tensors that a stage computes from the batch, such as masks, are
never sent.

The forms of blocks' outputs and of tensors between blocks, from calls of blocks in several forwards.

A block that is skipped or passed by returns something of the form of its output.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, partial, reduce
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import check_input
from motet.models.parameter_values import set_values
from motet.models.torch_private import intercept_calls, is_in_backward
from motet.models.user_module import find_blocks
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stage_wires import BlockOutput, StageWire
from motet.parallel.proof.module_calls import (
    Arguments,
    Path,
    arguments_of,
    items_of,
    tensors_by_path,
    value_at,
    with_values,
)

PLAIN_CONTAINERS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict"}


def describe_sizes(shapes: Sequence[Sequence[int]], sizes: Sequence[Mapping[str, int]]) -> tuple[int | str, ...]:
    """The dims of a tensor whose shapes in several micro-batches are known, by the sizes of those.

    | dims | text |
    |---|---|
    | the same in all micro-batches | the number |
    | one size, or a product of two | `tokens`, `rows * tokens` |
    | a multiple of those, or more by a constant | `2 * tokens`, `tokens + 1` |
    """
    names = list(sizes[0])
    words = [(name,) for name in names] + [pair for pair in product(names, names) if pair[0] < pair[1]]
    return tuple(_describe_size(lengths, words, sizes) for lengths in zip(*shapes, strict=True))


def _describe_size(
    lengths: Sequence[int], words: Sequence[tuple[str, ...]], sizes: Sequence[Mapping[str, int]]
) -> int | str:
    if len(set(lengths)) == 1:
        return lengths[0]
    fits = []
    for word in words:
        counts = [prod(each[name] for name in word) for each in sizes]
        if counts[0] != counts[1]:
            times, rest = divmod(lengths[1] - lengths[0], counts[1] - counts[0])
            plus = lengths[0] - times * counts[0]
            if not rest and all(times * count + plus == n for count, n in zip(counts, lengths, strict=True)):
                text = " * ".join([str(times)] * (times != 1) + [*word]) + f" + {plus}" * (plus != 0)
                fits.append((plus != 0, times != 1, len(word), text))
    check_input(
        fits,
        f"layout.pp: a tensor between two blocks has {', '.join(map(str, lengths))} elements along a dimension in "
        f"micro-batches of {'; '.join(map(str, sizes))}, which follows from none of these sizes; leave layout.pp out",
    )
    return min(fits)[-1]


def describe_output(outputs: Sequence[Any], arguments: Sequence[Arguments]) -> BlockOutput:
    """The form of a block's outputs in several forwards, in which it had these arguments."""
    first, items = outputs[0], items_of(outputs[0])
    if isinstance(first, Tensor):
        return _describe_tensor(outputs, arguments)
    if items or type(first) in PLAIN_CONTAINERS:
        items_by_run = [items_of(output) for output in outputs]
        described = ((key, describe_output([inner[key] for inner in items_by_run], arguments)) for key in items)
        name = f"{type(first).__module__}:{type(first).__qualname__}"
        return BlockOutput(container=PLAIN_CONTAINERS.get(type(first), name), items=tuple(described))
    if isinstance(first, bool | int | float | str):
        return BlockOutput(value=first)
    same = ((key,) for key, value in arguments[0].items() if value is first and value is not None)
    return BlockOutput(argument=next(same, ()))


def _describe_tensor(outputs: Sequence[Tensor], arguments: Sequence[Arguments]) -> BlockOutput:
    shapes, dtype = [output.shape for output in outputs], outputs[0].dtype
    by_path = {path: [value_at(each, path) for each in arguments] for path, _ in tensors_by_path(arguments[0])}
    like = {path: tensors for path, tensors in by_path.items() if tensors[0].dtype == dtype}
    same = (path for path, tensors in like.items() if [tensor.shape for tensor in tensors] == shapes)
    if path := next(same, None):
        return BlockOutput(argument=path)
    sources: dict[tuple[int, ...], Path] = {}
    for path, tensors in by_path.items():
        for dim, lengths in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
            sources.setdefault(lengths, (*path, dim))
    dims = (n[0] if len(set(n)) == 1 else sources.get(n, 1) for n in zip(*shapes, strict=True))
    other_dtype = "" if like else str(dtype).removeprefix("torch.")
    return BlockOutput(next(iter(like or by_path), ()), tuple(dims), other_dtype)


def output_of_form(form: BlockOutput, arguments: Arguments, make: Callable[[BlockOutput, Any], Any]) -> Any:
    """A block's output of this form; `make` returns the value in place of an argument."""
    if form.container:
        return _make_container(form.container, {k: output_of_form(item, arguments, make) for k, item in form.items})
    return make(form, value_at(arguments, form.argument)) if form.argument else form.value


def _make_container(name: str, items: Mapping[int | str, object]) -> Any:
    """A container of these items; `name` is that of a built-in type, or `package.module:Class`."""
    if ":" not in name:
        return dict(items) if name == "dict" else {"tuple": tuple, "list": list}[name](items.values())
    module, _, path = name.partition(":")
    kind: Any = reduce(getattr, path.split("."), import_module(module))
    if issubclass(kind, tuple):
        return kind(*items.values())
    if issubclass(kind, Mapping) and not is_dataclass(kind):
        return kind(items)
    return kind(**{str(key): value for key, value in items.items()})


class _BorderReachedError(BaseException):  # A module may have `except Exception` around its blocks
    """The forward has come to the first block after the stage."""


@dataclass
class StageRun:
    """One forward of a stage."""

    stage: int
    blocks: range
    wires: Sequence[StageWire]  # Wires into the stage
    received: Sequence[Tensor]
    wires_out: Sequence[StageWire]
    sent: list[Any] = field(default_factory=list)
    originals: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # By id: (in the arguments, received)
    replaced: dict[int, dict[Path, Tensor]] = field(default_factory=dict)  # Block -> tensors in place of arguments
    blank: dict[object, Tensor] = field(default_factory=dict)  # Tensors of NaN by shape, dtype and device
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)

    @cached_property
    def untouched_blocks(self) -> range:
        """Blocks of the stage that keep the arguments of the forward."""
        is_passed_on = any(wire.is_constant for wire in self.wires)
        return range(0) if is_passed_on else range(self.blocks.start + bool(self.wires), self.blocks.stop)

    def replace_arguments(self, block_id: int, arguments: Arguments) -> Arguments:
        """The arguments of a block with received tensors, wherever the forward passes the tensors that those replace.

        In recomputation the arguments may be other objects, so the paths of the forward count.
        """
        if not self.wires:
            return arguments
        if block_id not in self.replaced:
            by_wire = dict[Path, Tensor]()
            for wire, tensor in zip(self.wires, self.received, strict=True) if block_id == self.blocks.start else ():
                original, by_wire[wire.place] = (
                    value_at(arguments, wire.place),
                    tensor.clone() if wire.is_written else tensor,
                )
                if isinstance(original, Tensor):
                    self.originals[id(original)] = original, by_wire[wire.place]
            is_hidden = (
                self.has_gradients and not torch.is_grad_enabled() and any(t.requires_grad for t in by_wire.values())
            )
            check_input(
                not is_hidden,
                f"layout.pp: block {block_id} runs without gradients of its stage's received tensors, as in a "
                "reentrant checkpoint; recompute blocks with use_reentrant=False",
            )
            passed = ((path, self.originals.get(id(tensor))) for path, tensor in tensors_by_path(arguments))
            self.replaced[block_id] = {path: pair[1] for path, pair in passed if pair} | by_wire
        after: Arguments = with_values(arguments, replaced) if (replaced := self.replaced[block_id]) else arguments
        return after

    def skip(self, output: BlockOutput, arguments: Arguments) -> Any:
        """A value of the form of a block's output."""
        return output_of_form(output, arguments, partial(self._blank_like, arguments))

    def _blank_like(self, arguments: Arguments, output: BlockOutput, like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape, dtype = like.shape, getattr(torch, output.dtype) if output.dtype else like.dtype
        if output.dims is not None:
            shape = torch.Size(dim if isinstance(dim, int) else _size_at(arguments, dim) for dim in output.dims)
        key = shape, dtype, like.device
        if key not in self.blank:
            self.blank[key] = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=key[2])
        return self.blank[key].detach()  # Another object each time, so that no argument is taken for another


def _size_at(arguments: Arguments, path: Path) -> int:
    return int(value_at(arguments, path[:-1]).shape[path[-1]])


class PipelineStages:
    """The stages of a module, one of which runs at a time. Outside of `run` the module is unchanged."""

    def __init__(self, module: nn.Module, sharding: ModelSharding) -> None:
        self._sharding = sharding
        blocks = [module.get_submodule(name) for name in sharding.block_names] or find_blocks(module)
        self._run: StageRun | None = None
        self._recomputed: Callable[[], StageRun | None] = lambda: None  # The run of which backward is under way
        self._restore = [intercept_calls(block, partial(self._call, i)) for i, block in enumerate(blocks)]

    @property
    def is_running(self) -> bool:
        """Whether a forward of a stage is under way."""
        return self._run is not None

    def remove(self) -> None:
        """Let the module run without stages again."""
        while self._restore:
            self._restore.pop()()

    def run(self, stage: int, compute: Callable[[], Tensor], received: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Run the forward `compute` as one stage on the tensors of the stage before, in the order of the wires.

        Returns the tensors that cross the next border, in the order of its wires, or the last stage's output. Received
        tensors are leaves; they get gradients in the backward of the returned tensors.
        """
        wires = ((), *self._sharding.wires)
        is_last = stage == len(self._sharding.stages) - 1
        blocks = self._sharding.stages[stage]
        run = StageRun(stage, blocks, wires[stage], received, () if is_last else wires[stage + 1])
        self._run = run
        try:
            result = compute()
        except _BorderReachedError:
            is_complete = True
        else:
            run.sent, is_complete = [result], is_last
        finally:
            self._run = None
            run.originals, run.blank = {}, {}
        check_input(
            is_complete,
            f"the forward ended before block {run.blocks.stop}, the first after stage {stage}; let each forward call "
            "all blocks without catching exceptions, or leave layout.pp out",
        )
        sent, run.sent = run.sent, []  # A tensor whose hook knows the tensor would never be freed
        for tensor in sent:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, run))
        return sent

    def _begin_backward(self, run: StageRun, _: Tensor) -> None:
        self._recomputed = weakref.ref(run)

    def current_run(self) -> StageRun | None:
        """The forward that is under way, or whose blocks backward recomputes."""
        return self._recomputed() if is_in_backward() else self._run

    def _call(self, block_id: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self.current_run()
        if run is None:
            return call(*args, **kwargs)
        if block_id in run.untouched_blocks:
            return call(*args, **kwargs)
        arguments = arguments_of(args, kwargs)
        if block_id < run.blocks.start:
            return run.skip(self._sharding.block_outputs[block_id], arguments)
        after = run.replace_arguments(block_id, arguments)
        if block_id >= run.blocks.stop:
            run.sent = [value_at(after, wire.place) for wire in run.wires_out]
            raise _BorderReachedError
        if after is arguments:
            return call(*args, **kwargs)
        return call(*(after[i] for i in range(len(args))), **{name: after[name] for name in kwargs})


def forget_parameters(
    module: nn.Module, names: Iterable[str], *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """Let parameters be NaN without memory and without a gradient, under all of their names.

    A stage may make its tensors in their dtype, so they have the dtype of the parameters which are held.
    """
    for name in names:
        parameter = module.get_parameter(name)
        parameter.requires_grad_(False)
        is_float, place = parameter.is_floating_point(), device or parameter.device
        fill, kind = (torch.nan, dtype or parameter.dtype) if is_float else (0, parameter.dtype)
        set_values(parameter, torch.full((), fill, dtype=kind, device=place).expand(parameter.shape))
