"""The outcome of the proof of splits: regions whose linear layers are split together, and parts that stay whole."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from motet.core.errors import names_matching
from motet.parallel.model_sharding import TENSOR_DIMENSION, BoundaryComm, InputWidth, ShardRule

LayerSplit = Literal["columns", "rows", "whole"]  # The split features: output, input or none
RULE_OF_JOB = "a rule of the job"  # Reason why a layer stays whole or is split
LocalAttribute = tuple[str, str, int]  # (module, integer attribute or `config.NAME`, value on a rank)


@dataclass(frozen=True)
class SplitRegion:
    """Linear layers that are split together: the first ones by columns, those whose outputs are summed by rows."""

    module: str  # The innermost module that holds all of it
    # Column layers by the tensor that they read: layers that read one tensor share its communication. Without column
    # layers, every rank has all that the row layers read, and takes its slice along the last dimension.
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    rules: Mapping[str, ShardRule] = field(default_factory=dict)  # Rules of split tensors, and of whole ones inside
    attributes: tuple[LocalAttribute, ...] = ()
    input_widths: tuple[InputWidth, ...] = ()
    found_by: str = "shapes"

    def comms(self) -> Iterator[BoundaryComm]:
        """Its communication, where every rank has all of its input."""
        return region_comms(self.columns, self.rows)


@dataclass(frozen=True)
class WholeRegion:
    """A module that every rank computes as a whole."""

    module: str
    reason: str


@dataclass(frozen=True)
class ProvenSplits:
    """The outcome of the proof for one module."""

    regions: tuple[SplitRegion, ...]
    whole_regions: tuple[WholeRegion, ...] = ()


def region_comms(columns: Sequence[tuple[str, ...]], rows: Sequence[str]) -> Iterator[BoundaryComm]:
    """The communication of a region that reads and returns activations which every rank has."""
    for first, *others in columns:
        yield BoundaryComm(first, "input", 0, "copy", TENSOR_DIMENSION, shared_by=tuple(others))
    for row in rows:
        if not columns:
            yield BoundaryComm(row, "input", 0, "split", TENSOR_DIMENSION)
        yield BoundaryComm(row, "output", 0, "sum", TENSOR_DIMENSION)


def splits_by_rule(rules: Mapping[str, LayerSplit], layers: Collection[str]) -> dict[str, LayerSplit]:
    """The split of each layer that `layout.rules` name: the last glob that matches it counts."""
    matching = {glob: names_matching([glob], layers, "layout.rules: {!r} matches no layer") for glob in rules}
    return {layer: split for glob, split in rules.items() for layer in matching[glob]}
