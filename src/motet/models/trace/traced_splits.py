"""The splits of a traced block over tensor-parallel ranks, from the sizes and the order of its products.
Products whose outputs are exactly the heads of the attention after them are split by heads, and so is the product that
reads its result. A product that reads the output of another, and gives as many features as that one reads, is the
second half of a feed-forward network. Experts and small products stay whole, as in motet's families."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from motet.models.spec.layer_specs import (
    STREAM,
    AttentionSpec,
    BlockSpec,
    DimensionUnits,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec

_SMALL_PART = 0.05  # The largest part of a block's FLOPs in products that stay whole, such as a router

Operation = MatmulSpec | AttentionSpec


@dataclass(frozen=True)
class TracedTensor:
    """A saved tensor, and the number of operators before the one that made it."""

    tensor: SavedActivation | SavedAttentionMatrix
    operator: int


@dataclass(frozen=True)
class TracedBlock:
    """A block without its operations and saved tensors, and these in the order of the forward."""

    spec: BlockSpec
    operations: tuple[tuple[Operation, int], ...]
    saved: tuple[TracedTensor, ...]


@dataclass(frozen=True)
class _Region:
    """Operators from the first product whose outputs are split to the product that adds them up."""

    start: int
    stop: int
    units: DimensionUnits


def derive_splits(blocks: Sequence[TracedBlock], vocab_size: int | None) -> ModelSpec:
    """The spec with the splits of each block."""
    problem, is_fused, result = None, False, list[BlockSpec]()
    for block in blocks:
        if block.spec.input is None:
            result.append(_outside(block, vocab_size))
            continue
        splits = _BlockSplits(block)
        problem = problem or splits.problem()
        is_fused = is_fused or splits.is_fused
        result.append(splits.spec())
    return ModelSpec(tuple(result), has_fused_products=is_fused, split_problem=problem)


def _outside(block: TracedBlock, vocab_size: int | None) -> BlockSpec:
    """Embedding and output head, which ranks split by the vocabulary."""
    size = vocab_size or -1
    split = DimensionUnits("vocabulary", (size,))
    parameters = tuple(
        replace(p, split=split, split_dim=p.shape.index(size)) if size in p.shape else p
        for p in block.spec.layer.parameters
    )
    operations = tuple(
        replace(operation, split=split)
        if isinstance(operation, MatmulSpec) and operation.out_features == size
        else operation
        for operation, _ in block.operations
    )
    saved = tuple(
        replace(each.tensor, split=split)
        if isinstance(each.tensor, SavedActivation) and each.tensor.elements % size == 0 and size > 1
        else each.tensor
        for each in block.saved
    )
    return replace(block.spec, layer=LayerSpec(parameters, operations, saved))


class _BlockSplits:
    def __init__(self, block: TracedBlock) -> None:
        self._block = block
        self._operations = [operation for operation, _ in block.operations]
        self._operators = [operator for _, operator in block.operations]
        self._split = dict[int, tuple[DimensionUnits, bool]]()  # Index of a product -> (split, sums its outputs)
        self._regions = list[_Region]()
        self.is_fused = False
        for index, operation in enumerate(self._operations):
            if isinstance(operation, AttentionSpec):
                self._split_attention(index, operation)
        self._split_feed_forward()

    def problem(self) -> str | None:
        """Why ranks would compute the same, or None."""
        weights = {
            index: operation.in_features * operation.out_features * operation.uses_per_token
            for index, operation in enumerate(self._operations)
            if isinstance(operation, MatmulSpec) and ".experts." not in f".{operation.parameter}"
        }
        unsplit = {index: size for index, size in weights.items() if index not in self._split}
        if sum(unsplit.values()) <= _SMALL_PART * sum(weights.values()):
            return None
        largest = self._operations[max(unsplit, key=lambda index: unsplit[index])]
        assert isinstance(largest, MatmulSpec)
        sizes = f"{largest.in_features} x {largest.out_features}"
        return f"the trace does not show how to split {largest.parameter} ({sizes}) of {self._block.spec.name}"

    def spec(self) -> BlockSpec:
        """The block with its splits."""
        operations = tuple(self._with_split(index) for index in range(len(self._operations)))
        parameters = tuple(self._split_parameter(parameter) for parameter in self._block.spec.layer.parameters)
        saved = tuple(self._split_saved(each) for each in self._block.saved)
        return replace(self._block.spec, layer=LayerSpec(parameters, operations, saved))

    # --- regions ---

    def _split_attention(self, index: int, attention: AttentionSpec) -> None:
        after = next(iter(self._products(index, len(self._operations))), None)
        before = list[int]()
        for i in reversed([i for i in self._products(0, index) if i not in self._split]):
            product = self._product(i)
            reads_stream = self._block.spec.input is None or product.in_features == self._block.spec.input.elements
            if not reads_stream or self._head_counts(attention, product.out_features, 0) is None:
                break
            before.append(i)
        width = attention.heads * attention.value_dim
        if after is None or not before or self._product(after).in_features != width:
            return
        counts = {i: self._head_counts(attention, self._product(i).out_features, len(before)) for i in before}
        if None in counts.values():
            return
        splits = {i: DimensionUnits("heads", units) for i, units in counts.items() if units is not None}
        self.is_fused = self.is_fused or any(len(split.units) > 1 for split in splits.values())
        kv_heads = min(count for split in splits.values() for count in split.units)
        self._operations[index] = replace(attention, kv_heads=min(kv_heads, attention.kv_heads or attention.heads))
        self._split |= {i: (split, False) for i, split in splits.items()}
        units = DimensionUnits("heads", (attention.heads,))
        self._split[after] = units, True
        self._regions.append(_Region(self._operators[min(before)], self._operators[after], units))

    def _head_counts(self, attention: AttentionSpec, outputs: int, products: int) -> tuple[int, ...] | None:
        """The heads that a product makes, if it is one of `products` before attention (0: not known yet)."""
        heads, key_dim, value_dim = attention.heads, attention.key_dim, attention.value_dim
        rest, pair = outputs - heads * key_dim, key_dim + value_dim
        fused = rest // pair if rest > 0 and rest % pair == 0 else 0
        shared = outputs // pair if outputs % pair == 0 else 0
        single = next((outputs // dim for dim in (key_dim, value_dim) if outputs % dim == 0), 0)
        choices = {
            "queries, keys and values": (products <= 1, fused, (heads, fused, fused)),
            "keys and values": (products in (0, 2) and single != heads, shared, (shared, shared)),
            "one of them": (products != 1, single, (single,)),
        }
        for is_possible, count, units in choices.values():
            if is_possible and count and heads % count == 0:
                return units
        return None

    def _split_feed_forward(self) -> None:
        """Split pairs of products, of which the second reads the output of the first."""
        left = [i for i in self._products(0, len(self._operations)) if i not in self._split]
        for down in left:
            width, outputs = self._product(down).in_features, self._product(down).out_features
            ups = [
                i
                for i in left
                if i < down
                and i not in self._split
                and self._product(i).in_features == outputs
                and self._product(i).out_features in (width, 2 * width)
            ]
            if not ups or width <= 1:
                continue
            units = DimensionUnits("inner", (width,))
            for i in ups:
                parts = self._product(i).out_features // width
                self.is_fused = self.is_fused or parts > 1
                self._split[i] = DimensionUnits("inner", (width,) * parts), False
            self._split[down] = units, True
            self._regions.append(_Region(self._operators[min(ups)], self._operators[down], units))

    def _products(self, start: int, stop: int) -> Iterator[int]:
        for index in range(start, stop):
            operation = self._operations[index]
            if isinstance(operation, MatmulSpec) and ".experts." not in f".{operation.parameter}":
                yield index

    def _product(self, index: int) -> MatmulSpec:
        operation = self._operations[index]
        assert isinstance(operation, MatmulSpec)
        return operation

    # --- values with splits ---

    def _with_split(self, index: int) -> Operation:
        operation = self._operations[index]
        if isinstance(operation, AttentionSpec):
            return operation
        split, sums = self._split.get(index, (STREAM, False))
        return replace(operation, split=split, sums_outputs=sums)

    def _split_parameter(self, parameter: ParameterSpec) -> ParameterSpec:
        for index, (split, sums) in self._split.items():
            product = self._product(index)
            module = product.parameter.rpartition(".")[0]
            if parameter.name == product.parameter and len(parameter.shape) == 2:
                size = product.in_features if sums else product.out_features
                dim = int(sums) if parameter.shape[int(sums)] == size else parameter.shape.index(size)
                return replace(parameter, split=split, split_dim=dim)
            is_bias = parameter.name == f"{module}.bias" and parameter.shape == (product.out_features,)
            if is_bias and not sums:
                return replace(parameter, split=split)
        return parameter

    def _split_saved(self, each: TracedTensor) -> SavedActivation | SavedAttentionMatrix:
        tensor, region = each.tensor, self._region(each.operator)
        if isinstance(tensor, SavedAttentionMatrix):
            return replace(tensor, split=region.units) if region and tensor.heads == sum(region.units.units) else tensor
        if tensor.per not in ("token", "source"):
            return tensor
        if region is None:
            gathers = next(
                (split for i, (split, sums) in self._split.items() if not sums and self._reads(i, tensor)), None
            )
            return replace(tensor, split=STREAM if gathers is None else replace(STREAM, region=gathers.split_by))
        units = [
            split for i, (split, sums) in self._split.items() if not sums and split.split_by == region.units.split_by
        ]
        exact = next(
            (split for split in (*units, region.units) if tensor.elements % max(1, sum(split.units)) == 0), None
        )
        return tensor if exact is None else replace(tensor, split=exact)

    def _region(self, operator: int) -> _Region | None:
        return next((each for each in self._regions if each.start <= operator < each.stop), None)

    def _reads(self, index: int, tensor: SavedActivation) -> bool:
        return tensor.name == self._product(index).parameter.removesuffix(".weight") + ".input"
