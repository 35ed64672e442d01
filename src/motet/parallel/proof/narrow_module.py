"""A copy of a module with few of its blocks and few entries of its vocabulary, at the widths of the module itself.

It stands for modules that cannot be made smaller, because their sizes are not arguments. A proof then needs the memory
of a few copies of its largest block, whatever the number of blocks and of entries.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from torch import nn

from motet.parallel.pipeline.stage_wires import BlockOutput
from motet.parallel.pipeline.stages.stage_module import describe_output, output_of_form
from motet.parallel.proof.module_calls import ModuleCall, arguments_of
from motet.parallel.proof.twin_match import TracedModule

FEW_ENTRIES = 512  # About the number of entries that a larger vocabulary keeps


class _PassedBlock(nn.Module):
    """A block that returns its arguments in the form of its output. Code sees its other attributes."""

    def __init__(self, block: nn.Module, form: BlockOutput) -> None:
        super().__init__()
        self._replaced, self._form = [block], form  # In a list, so that its parameters do not belong to this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return output_of_form(self._form, arguments_of(args, kwargs), lambda _, argument: argument)


def forms_of_blocks(calls: Mapping[str, Sequence[ModuleCall]]) -> dict[str, BlockOutput]:
    """The form of each block's output, by its last call."""
    return {name: describe_output([of[-1].output], [of[-1].arguments]) for name, of in calls.items()}


def blocks_to_keep(traced: TracedModule, forms: dict[str, BlockOutput], starts: Collection[int] = ()) -> set[str]:
    """The first and the last block of each list, one of each kind, those at one of each kind of border between stages,
    which begin at `starts`, and blocks that return a value other than their arguments."""
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


def keep_few_entries(parts: Sequence[nn.Module], entries: int, degree: int) -> int:
    """Let tables and heads of a vocabulary, whose parameters are on the meta device, have few entries, which ranks
    divide as before; returns their number.

    They are among `parts`, the modules outside of blocks. Where another size there is equal, all entries stay.
    """
    unit = math.lcm(degree, 8)
    first, other_sizes = -(-max(FEW_ENTRIES, 5 * degree) // unit) * unit + entries % unit, set(_sizes_of(parts))
    few = next(size for size in count(first, unit) if size not in other_sizes)
    tables = [part for part in parts if any(_has_entries(p, entries) for p in part._parameters.values())]
    if entries <= 2 * few or not _is_size_of_vocabulary(parts, tables, entries):
        return entries
    shorter = dict[nn.Parameter, nn.Parameter]()
    for part in parts:
        is_table = part in tables
        for key, parameter in part._parameters.items():
            if parameter is not None and len(parameter.shape) and len(parameter) == entries:
                if parameter not in shorter:
                    values = parameter.new_empty(few, *parameter.shape[1:])
                    shorter[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                part._parameters[key] = shorter[parameter]
        for name, value in list(vars(part).items()):
            if type(value) is int and value == entries and (is_table or _is_of_vocabulary(name)):
                setattr(part, name, few)
            elif name == "padding_idx" and type(value) is int and value >= few:
                setattr(part, name, few - 1)
    return few


def _sizes_of(parts: Sequence[nn.Module]) -> Iterator[int]:
    """The sizes of tensors, and integer attributes."""
    for part in parts:
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            yield from () if tensor is None else tensor.shape
        yield from (value for value in vars(part).values() if type(value) is int)


def _has_entries(parameter: nn.Parameter | None, entries: int) -> bool:
    """Whether a parameter is a matrix with a row for each entry."""
    return parameter is not None and parameter.ndim > 1 and len(parameter) == entries


def _is_size_of_vocabulary(parts: Sequence[nn.Module], tables: Sequence[nn.Module], entries: int) -> bool:
    """Whether the number of entries is the length of tables and of their biases, and of nothing else."""
    in_tables = [parameter for table in tables for parameter in table._parameters.values() if parameter is not None]
    others = [
        p for part in parts for p in part._parameters.values() if p is not None and all(p is not t for t in in_tables)
    ]
    buffers = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
    return not any(entries in p.shape for p in (*others, *buffers)) and not any(
        entries in parameter.shape[1:] for parameter in in_tables
    )


def _is_of_vocabulary(name: str) -> bool:
    """Whether an attribute is, by its name, a number of entries of a vocabulary."""
    return any(word in name for word in ("vocab", "entries", "classes", "labels", "num_tokens"))


def vocabulary_of(parts: Sequence[nn.Module]) -> int | None:
    """The entries of the largest table of embeddings that is as long as a head; others may be tables of positions."""
    heads = {part.out_features for part in parts if isinstance(part, nn.Linear)}
    tables = (part.num_embeddings for part in parts if isinstance(part, nn.Embedding))
    return max((entries for entries in tables if entries in heads), default=None)
