"""The shapes of what crosses a border between stages where tensor-parallel ranks split activations, too."""

from collections.abc import Iterator, Mapping

from motet.parallel.model_inventory import ModelInventory
from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding, StageWire
from motet.parallel.parallel_dims import ParallelDims

Divisors = tuple[
    tuple[tuple[int, ...], ...], ...
]  # For each border, wire and dimension: over how many ranks it is split


def local_shape(
    wire: StageWire, sizes: Mapping[str, int], divisors: tuple[int, ...], *, needs_gradient: bool = True
) -> tuple[int, ...]:
    """The shape on one rank. Without gradients a sequence that ranks do not divide stays whole."""
    shape = wire.shape(sizes)
    is_even = all(length % divisor == 0 for length, divisor in zip(shape, divisors, strict=True))
    if not is_even and not needs_gradient:
        return shape
    return tuple(length // divisor for length, divisor in zip(shape, divisors, strict=True))


def wire_divisors(sharding: ModelSharding, inventory: ModelInventory, dims: ParallelDims) -> Divisors:
    """The ranks over which the wires of each border are split.

    Inside of a list of blocks the residual stream lies as it enters the block after the border. A tensor that all
    blocks read, such as the biases of attention, is split where it comes from a table whose entries are split by heads.
    """
    degree, widths = dims.size(TENSOR_DIMENSION), set(_split_widths(sharding, inventory))
    entering = {comm.module for comm in sharding.boundary_comms if (comm.side, comm.operation) == ("input", "split")}
    streams = {each.module: each.splits for each in sharding.activations if each.side == "input"}
    borders = []
    for wires, stage in zip(sharding.wires, sharding.stages[1:], strict=True):
        block = sharding.block_names[stage.start] if sharding.block_names else ""
        split_dims = set() if block in entering else {split.dim for split in streams.get(block, ())}
        borders.append(
            tuple(
                tuple(
                    degree if (dim in widths if wire.is_constant else index in split_dims) else 1
                    for index, dim in enumerate(wire.dims)
                )
                for wire in wires
            )
        )
    return tuple(borders)


def _split_widths(sharding: ModelSharding, inventory: ModelInventory) -> Iterator[int]:
    """The numbers of heads that tables between layers have an entry for."""
    shapes = {tensor.name: tensor.shape for tensor in inventory.tensors}
    indexed = {each.module for each in sharding.activations if each.side == "input" and not each.splits}
    for name, rule in sharding.rules.items():
        if name.rpartition(".")[0] in indexed:
            yield from (shapes[name][split.dim] for split in rule.splits)
