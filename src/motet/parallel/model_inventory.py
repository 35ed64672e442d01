"""The tensors of a model as the single-device module has them: logical names and whole shapes.

Checkpoints, `motet verify` and the sharding of a model use logical names, whatever a rank holds of the tensor.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from motet.models.spec.model_spec import ModelSpec

TensorKind = Literal["trained", "frozen", "statistics", "table", "load"]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the model; tied tensors are one tensor with several names.

    | kind | what it is |
    |---|---|
    | trained, frozen | a parameter, which the optimizer updates or not |
    | statistics | a buffer that a forward updates, such as the mean of a batch norm |
    | table | a buffer that is computed when the model is built, such as rotary angles |
    | load | a buffer that counts what each expert got |
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    optimizer_group: int = 0
    aliases: tuple[str, ...] = ()
    block: int | None = None  # The number of the transformer block; None outside of the blocks
    # Blocks whose pipeline stages need the tensor, -1 for the last one. An inventory fills it in where it is empty: a
    # tensor that is defined before the blocks is needed with the first, one after them, or an alias, with the last.
    needed_with_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelInventory:
    """All tensors of a model, in the order of definition."""

    tensors: tuple[TensorInfo, ...]

    def __post_init__(self) -> None:
        filled, outside = [], 0
        for tensor in self.tensors:
            outside = outside if tensor.block is None else -1
            blocks = (outside if tensor.block is None else tensor.block, *(-1 for _ in tensor.aliases))
            filled.append(replace(tensor, needed_with_blocks=tensor.needed_with_blocks or blocks))
        object.__setattr__(self, "tensors", tuple(filled))

    @property
    def trained(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.kind == "trained")

    @property
    def parameter_count(self) -> int:
        """Elements of the parameters, trained and frozen."""
        return sum(prod(tensor.shape) for tensor in self.tensors if tensor.kind in ("trained", "frozen"))


def inventory_of_spec(spec: ModelSpec) -> ModelInventory:
    """The parameters of a model that is known by its sizes, in the optimizer groups of the default settings."""
    tensors, blocks = [], 0
    for block in spec.blocks:
        is_block = "{i}" in block.prefix
        for i, repetition in enumerate(block.parameters_by_repetition()):
            block_id = blocks + i if is_block else None
            tensors += [
                TensorInfo(p.name, p.shape, "float32", "trained", len(p.shape) < 2, (), block_id) for p in repetition
            ]
        blocks += block.repeat if is_block else 0
    return ModelInventory(tuple(tensors))
