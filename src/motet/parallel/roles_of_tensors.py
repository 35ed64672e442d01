"""The role of each tensor in tensor parallelism, and the work that its ranks repeat, read from a `ModelSharding`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

from motet.models.spec.layer_specs import MatmulSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.model_sharding import LOSS, TENSOR_DIMENSION, ModelInventory, ModelSharding, ShardRule, TensorInfo
from motet.parallel.parallel_dims import ParallelDims


@dataclass(frozen=True)
class TensorRole:
    """A tensor on tensor-parallel ranks, or equal tensors of several blocks, such as `blocks.{i}.norm.weight`."""

    name: str
    count: int
    shape: tuple[int, ...]
    split: str  # columns, rows, vocabulary, whole, or the dimension of a tensor other than a layer's weight
    local_shape: tuple[int, ...]
    partial_over: tuple[str, ...]  # Dimensions of more than one rank over which its gradient is summed
    reason: str
    repeats_work: bool  # Every tensor-parallel rank computes with all of it, for the same tokens


def tensor_roles(inventory: ModelInventory, sharding: ModelSharding, dims: ParallelDims) -> list[TensorRole]:
    """The roles of the parameters, in the order of the model."""
    layers, alike = split_layers(sharding), dict[tuple[str, tuple[int, ...], ShardRule], list[TensorInfo]]()
    for tensor in inventory.tensors:
        if tensor.kind in ("trained", "frozen"):
            rule = sharding.rule(tensor.name)
            same_in_blocks = replace(rule, reason=_NUMBER.sub("{i}", rule.reason))
            alike.setdefault((_NUMBER.sub("{i}", tensor.name), tensor.shape, same_in_blocks), []).append(tensor)
    kinds = Counter(name for name, _, _ in alike)
    roles = []
    for (name, shape, rule), tensors in alike.items():
        spec, partial_over = sharding.spec(tensors[0], {}, dims), sharding.partial_over(tensors[0])
        roles.append(
            TensorRole(
                name if kinds[name] == 1 and len(tensors) > 1 else _with_numbers(name, tensors),
                len(tensors),
                shape,
                _split_name(tensors[0], rule, layers),
                shape if spec is None else spec.local_shape,
                tuple(dim for dim, size in dims.sizes if size > 1 and dim in partial_over),
                rule.reason if len(tensors) > 1 else sharding.rule(tensors[0].name).reason,
                repeats_work(rule),
            )
        )
    return roles


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")  # A component of a name


def _with_numbers(name: str, tensors: Iterable[TensorInfo]) -> str:
    """The name with the first number of each tensor, such as `blocks.{0-2,5}.norm.weight`."""
    names = [tensor.name for tensor in tensors]
    if len(names) == 1:
        return names[0]
    numbers = sorted({int(_NUMBER.findall(each)[0]) for each in names})
    starts = [b for a, b in pairwise([-2, *numbers]) if b != a + 1]
    stops = [a for a, b in pairwise([*numbers, numbers[-1] + 2]) if b != a + 1]
    ranges = (f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, stops, strict=True))
    return name.replace("{i}", f"{{{','.join(ranges)}}}", 1)


def split_layers(sharding: ModelSharding) -> dict[str, str]:
    """The split of each layer at which ranks communicate. Columns open a region, which rows close.

    A layer that takes its features of a whole input has only rows. Other rows without columns before them, or by the
    layer itself, are those of an embedding or a head, and columns that nothing closes are those of a head.
    """
    splits, open_layers, rows_alone = dict[str, str](), list[str](), set[str]()
    for comm in sharding.boundary_comms:
        layers = (comm.module, *comm.shared_by)
        if comm.side == "input" and comm.operation in ("copy", "gather"):
            open_layers += layers
            splits |= dict.fromkeys(layers, "columns")
        elif (comm.side, comm.operation, comm.dim) == ("input", "split", -1):
            rows_alone.add(comm.module)
        elif comm.side == "output" and comm.operation in ("sum", "scatter"):
            is_vocabulary = open_layers in ([], [comm.module]) and comm.module not in rows_alone
            splits |= dict.fromkeys(layers, "vocabulary" if is_vocabulary else "rows")
            open_layers = []
    return splits | dict.fromkeys(open_layers, "vocabulary")


def _split_name(tensor: TensorInfo, rule: ShardRule, layers: Mapping[str, str]) -> str:
    if not rule.splits:
        return "whole"
    paths = (list(accumulate(name.split(".")[:-1], "{}.{}".format)) for name in (tensor.name, *tensor.aliases))
    named = (layers.get(module) for path in paths for module in reversed(path))
    return next(filter(None, named), f"dimension {rule.splits[0].dim}")


def repeats_work(rule: ShardRule) -> bool:
    """Whether every tensor-parallel rank computes with all of a tensor, for the same tokens."""
    return not rule.splits and TENSOR_DIMENSION not in rule.partial_over


def repeated_parameters(inventory: ModelInventory, sharding: ModelSharding) -> float:
    """The fraction of the parameters that every tensor-parallel rank holds as a whole."""
    sizes = {tensor.name: prod(tensor.shape) for tensor in inventory.tensors if tensor.kind in ("trained", "frozen")}
    repeated = sum(size for name, size in sizes.items() if not sharding.rule(name).splits)
    return repeated / max(sum(sizes.values()), 1)


def repeated_products(inventory: ModelInventory, sharding: ModelSharding, flops: Mapping[str, int]) -> float:
    """The fraction of the FLOPs of products with weights that every tensor-parallel rank repeats.

    `flops` are those of the weights by name. Where they are not known, every layer takes all tokens. A layer is then a
    matrix that is split, or is whole for a stated reason, and that is not a table of embeddings.
    """
    if not flops or not flops.keys() <= {tensor.name for tensor in inventory.tensors}:
        layers = split_layers(sharding)
        sums = {comm.module for comm in sharding.boundary_comms if comm.operation == "sum" and comm.argument != LOSS}
        tables = {module for module in sums if layers[module] == "vocabulary"}
        flops = {
            tensor.name: prod(tensor.shape)
            for tensor in inventory.tensors
            if len(tensor.shape) > 1 and sharding.rule(tensor.name) != ShardRule()
            if tensor.aliases or tensor.name.rpartition(".")[0] not in tables
        }
    repeated = sum(each for name, each in flops.items() if repeats_work(sharding.rule(name)))
    return repeated / max(sum(flops.values()), 1)


def flops_of_weights(spec: ModelSpec, shape: MicroBatchShape) -> dict[str, int]:
    """FLOPs of a forward's products with each weight."""
    flops: Counter[str] = Counter()
    for block in spec.blocks:
        for i in range(block.first_index, block.first_index + block.repeat):
            for product in block.layer.operations:
                if isinstance(product, MatmulSpec):
                    flops[block.prefix.format(i=i) + product.parameter] += product.flops(shape, "causal")
    return flops
