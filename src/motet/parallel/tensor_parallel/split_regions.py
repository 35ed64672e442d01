"""The outcome of the proof of splits: regions whose linear layers are split together, and parts that stay whole."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from motet.core.name_patterns import names_matching
from motet.parallel.model_sharding import ShardRule

LayerSplit = Literal["columns", "rows", "whole"]  # Output features are split, input features are, or nothing is
LocalAttribute = tuple[str, str, int]  # (module, integer attribute or `config.NAME`, value on a rank)


@dataclass(frozen=True)
class SplitRegion:
    """Linear layers that are split together: the first ones by columns, those whose outputs are summed by rows."""

    module: str  # The innermost module that holds all of it
    # Column layers by the tensor that they read: layers that read one tensor share its communication. Without column
    # layers, every rank has all that the row layers read, and takes its slice along the last dimension.
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    rules: Mapping[str, ShardRule] = field(default_factory=dict)  # Of split tensors, and of whole ones inside
    attributes: tuple[LocalAttribute, ...] = ()
    found_by: str = "shapes"


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


def splits_by_rule(rules: Mapping[str, LayerSplit], layers: Collection[str]) -> dict[str, LayerSplit]:
    """The split of each layer that `layout.rules` name: the last glob that matches it counts."""
    matching = {glob: names_matching([glob], layers, "layout.rules: {!r} matches no layer") for glob in rules}
    return {layer: split for glob, split in rules.items() for layer in matching[glob]}
