"""A copy of a module with few of its blocks and few entries of its vocabulary, at the widths of the module itself.

It stands for modules that cannot be made smaller, because their sizes are not arguments. A proof then needs the memory
of a few copies of its largest block, whatever the number of blocks and of entries.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from motet.parallel.model_sharding import BlockOutput
from motet.parallel.pipeline.stages.block_forms import describe_output, output_of_form
from motet.parallel.proof.module_calls import ModuleCall
from motet.parallel.proof.nested_tensors import arguments_of
from motet.parallel.proof.twin_match import TracedModule

FEW_ENTRIES = 512  # Of a vocabulary, about; a larger one keeps as many


class _PassedBlock(nn.Module):
    """A block that returns its arguments in the form of what it would return. Code sees its other attributes."""

    def __init__(self, block: nn.Module, form: BlockOutput) -> None:
        super().__init__()
        self._replaced, self._form = [block], form  # In a list, so that its parameters are not of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return output_of_form(self._form, arguments_of(args, kwargs), lambda _, argument: argument)


def forms_of_blocks(calls: Mapping[str, Sequence[ModuleCall]]) -> dict[str, BlockOutput]:
    """The form of what each block returns, by its last call."""
    return {name: describe_output([of[-1].output], [of[-1].arguments]) for name, of in calls.items()}


def blocks_to_keep(traced: TracedModule, forms: dict[str, BlockOutput], starts: Collection[int] = ()) -> set[str]:
    """The first and the last block of each list, one of each kind, those at one of each kind of border between stages,
    which begin at `starts`, and blocks that return something that is none of their arguments."""
    blocks, kinds = traced.blocks, traced.kinds
    kept = {block for block in blocks if not _can_be_passed(forms[block])}
    kept |= set({kinds[block]: block for block in reversed(blocks)}.values())
    borders = {(kinds[blocks[i - 1]], kinds[blocks[i]]): i for i in starts}
    return kept | {blocks[i + side] for i in borders.values() for side in (-1, 0)}


def _can_be_passed(form: BlockOutput) -> bool:
    if form.container:
        return all(_can_be_passed(inner) for _, inner in form.items)
    return form.dims is None and bool(form.argument or form.value is None)


def pass_blocks(module: nn.Module, kept: Collection[str], forms: dict[str, BlockOutput]) -> None:
    """Let a module pass by all blocks that are not kept."""
    for name in set(forms).difference(kept):
        path, _, key = name.rpartition(".")
        module.get_submodule(path)._modules[key] = _PassedBlock(module.get_submodule(name), forms[name])


def keep_few_entries(module: nn.Module, entries: int, degree: int) -> int:
    """Let tables and heads of a vocabulary, whose parameters are on the meta device, have few entries, which ranks
    divide as they did; returns their number."""
    unit = math.lcm(degree, 8)
    few = -(-max(FEW_ENTRIES, 5 * degree) // unit) * unit + entries % unit
    if entries <= 2 * few:
        return entries
    shorter = dict[nn.Parameter, nn.Parameter]()
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and len(parameter) == entries:
                if parameter not in shorter:
                    values = parameter.new_empty(few, *parameter.shape[1:])
                    shorter[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                part._parameters[key] = shorter[parameter]
        for name, value in list(vars(part).items()):
            if type(value) is int and value == entries:
                setattr(part, name, few)
            elif name == "padding_idx" and type(value) is int and value >= few:
                setattr(part, name, few - 1)
    return few


def vocabulary_of(module: nn.Module) -> int | None:
    """The entries of the largest table of embeddings."""
    return max((each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)), default=None)
