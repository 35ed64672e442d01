"""A model's spec from forwards at several sizes of the batch: the growth of a size tells the unit of its count.
A size that does not follow a power of rows and tokens exactly, such as a sequence less one token, gets the nearest.

The values of a recorded forward, at one size of the batch. They need no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, log2
from typing import Any, NamedTuple

from motet.core.errors import check_input
from motet.models.spec.layer_specs import (
    STREAM,
    AttentionSpec,
    BackwardKernel,
    BlockSpec,
    CountedPer,
    LayerSpec,
    MatmulSpec,
    ParameterSpec,
    SavedActivation,
    SavedAttentionMatrix,
)
from motet.models.spec.model_spec import ModelSpec
from motet.models.trace.traced_splits import TracedBlock, TracedTensor, derive_splits


class VisibleKeys(NamedTuple):
    """The keys that each query sees."""

    causal: bool
    window: int | None = None


@dataclass
class ProductRecord:
    """Products with one parameter."""

    name: str
    in_features: int
    out_features: int
    operator: int  # The number of operators before it
    dtype: str = ""  # That of its factors
    count: int = 0  # Vectors that are multiplied
    input_gradient: bool = False  # Backward computes it
    weight_gradient: bool = True


@dataclass
class AttentionRecord:
    """Attention of one module."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    lengths: tuple[int, int]  # Lengths of queries and keys
    causal: bool
    window: int | None
    operator: int


@dataclass
class SavedRecord:
    """A storage that autograd keeps."""

    name: str
    elements: int
    dtype: str
    operator: int = 0  # The operator that made it
    key: int = 0
    kernel: BackwardKernel = "other"


# A product of two activations: (its name, [batch, rows, depth, columns], visible keys of the first factor, operator)
UnweightedProduct = tuple[str, tuple[int, int, int, int], VisibleKeys | None, int]


@dataclass
class BlockRecord:
    """A block, or a stretch outside of blocks, which has no name."""

    name: str | None = None
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)  # The frozen parameters
    products: dict[tuple[str, int, int], ProductRecord] = field(default_factory=dict)
    attention: list[AttentionRecord] = field(default_factory=list)
    unweighted: list[UnweightedProduct] = field(default_factory=list)
    saved: list[SavedRecord] = field(default_factory=list)
    arguments: list[tuple[int, SavedRecord, bool]] = field(default_factory=list)  # (Storage, size, has a gradient)

    @property
    def is_empty(self) -> bool:
        return not (self.name or self.parameters or self.products or self.attention or self.unweighted or self.saved)


_ITEM = re.compile(r"(?<=\.)\d+(?=\.)")  # The index of an item of a list inside of a block
_NEARLY = Fraction(1, 8)  # A size that excludes the last token of a sequence is still counted per token
_PER: dict[tuple[int, int, int], CountedPer] = {
    (1, 1, 0): "token",
    (1, 0, 1): "source",
    (1, 0, 0): "row",
    (0, 1, 0): "position",
    (0, 0, 1): "position",
    (0, 0, 0): "step",
}


@dataclass(frozen=True)
class BatchSize:
    """Rows, tokens of a row, and tokens of its source, of a traced forward."""

    rows: int
    tokens: int
    source: int = 0

    def doubled(self) -> Iterator["BatchSize"]:
        """Twice the rows, twice the tokens, and twice the source if there is one."""
        yield replace(self, rows=2 * self.rows)
        yield replace(self, tokens=2 * self.tokens)
        if self.source:
            yield replace(self, source=2 * self.source)


@dataclass(frozen=True)
class _Growth:
    """`factor` x rows^a x tokens^b x source^c."""

    exponents: tuple[int, int, int]
    factor: Fraction

    @property
    def per(self) -> CountedPer:
        return _PER.get(self.exponents, "token")


def spec_of_records(
    forwards: Sequence[list[BlockRecord]], size: BatchSize, *, compute: str, vocab_size: int | None
) -> ModelSpec:
    """The spec of forwards at `size` and at its doubled sizes, in this order."""
    names = [[record.name for record in records] for records in forwards]
    check_input(
        all(each == names[0] for each in names),
        "the module calls other blocks for another number of rows or tokens, so its sizes cannot be traced",
    )
    reader = _Reader(size, compute)
    kept = {saved.key for record in forwards[0] for saved in record.saved}
    last = max((i for i, record in enumerate(forwards[0]) if record.name), default=len(forwards[0]))
    blocks = list[TracedBlock]()
    for index, records in enumerate(zip(*forwards, strict=True)):
        name = records[0].name
        place = "embedding" if index == 0 and name is None else "head" if index > last else "between blocks"
        blocks.append(reader.block(records, place if name is None else name, kept))
    return _with_runs(derive_splits(blocks, vocab_size))


class _Reader:
    def __init__(self, size: BatchSize, compute: str) -> None:
        self._size, self._compute = size, compute

    def growth(self, values: Sequence[int]) -> _Growth:
        """The growth of values over the sizes."""
        base, *doubled = values
        exponents = [min(2, max(0, round(log2(value / base)))) if base and value else 0 for value in doubled]
        rows, tokens, source = (*exponents, 0)[:3]
        rows = min(rows, 1)
        count = self._size.rows**rows * self._size.tokens**tokens * self._size.source**source
        return _Growth((rows, tokens, source), Fraction(base, count))

    def block(self, records: Sequence[BlockRecord], name: str, kept: set[int]) -> TracedBlock:
        """One block, at all sizes."""
        first = records[0]
        products, routed = self._products(records)
        operations = [*products, *self._attention(records), *self._unfused(records)]
        if first.name and not any(gradient for *_, gradient in first.arguments) and first.frozen >= {*first.parameters}:
            operations = [(replace(each, input_gradient=False), operator) for each, operator in operations]
        saved = tuple(
            TracedTensor(self._saved(sizes), sizes[0].operator) for sizes in _matched([r.saved for r in records])
        )
        inputs = [index for index, (_, _, has_gradient) in enumerate(first.arguments) if has_gradient][:1]
        # A block after frozen parameters has no argument with a gradient; the first argument is the stream
        inputs = (
            inputs or [index for index, (_, each, _) in enumerate(first.arguments) if each.dtype == self._compute][:1]
        )
        others = [
            [record.arguments[index][1] for record in records]
            for index, (key, _, _) in enumerate(first.arguments)
            if index not in inputs and key not in kept
        ]
        block_input = [self._saved([record.arguments[index][1] for record in records]) for index in inputs]
        tensor = block_input[0] if block_input and first.name else None
        spec = BlockSpec(
            name,
            LayerSpec(_parameters(first, routed)),
            input=replace(tensor, split=STREAM) if isinstance(tensor, SavedActivation) else None,
            arguments=tuple(map(self._saved, others)) if first.name else (),
        )
        return TracedBlock(spec, tuple(sorted(operations, key=lambda each: each[1])), saved)

    def _dtype(self, name: str) -> str:
        """A dtype as sizes of models have it, relative to that of the forward."""
        is_wide = name == "float32" and self._compute != "float64"
        return "compute" if name == self._compute else "wide" if is_wide else name

    def _products(self, records: Sequence[BlockRecord]) -> tuple[list[tuple[MatmulSpec, int]], dict[str, int]]:
        """Products with the operators before them; and for experts, name -> experts that each token visits."""
        shapes = records[0].parameters
        routed = self._routed_families(records)
        grouped = dict[tuple[str, int, int], tuple[list[int], ProductRecord]]()
        for index, record in enumerate(records):
            for product in record.products.values():
                family = _family(product.name)
                name = family if family in routed else product.name
                key = name, product.in_features, product.out_features
                counts, _ = grouped.setdefault(key, ([0] * len(records), product))
                counts[index] += product.count
        result = list[tuple[MatmulSpec, int]]()
        for (name, inputs, outputs), (counts, product) in grouped.items():
            growth, shape = self.growth(counts), shapes.get(name, ())
            uses = max(1, round(growth.factor))
            # A weight of three dimensions without experts, such as that of a convolution, has other features
            if len(shape) == 3 and uses < shape[0] and sorted(shape[1:]) == sorted((inputs, outputs)):
                routed[name] = uses
            if abs(growth.factor - uses) > _NEARLY:
                uses, inputs = 1, max(1, round(inputs * growth.factor))
            parameter = _expert_name(name) if name in routed else name
            made = MatmulSpec(
                parameter,
                inputs,
                outputs,
                growth.per,
                uses,
                input_gradient=product.input_gradient,
                weight_gradient=product.weight_gradient,
                result_dtype=self._dtype(product.dtype),
            )
            result.append((made, product.operator))
        return result, routed

    def _routed_families(self, records: Sequence[BlockRecord]) -> dict[str, int]:
        """Products of items of a list that each token visits in part: their common name -> items that it visits."""
        totals = dict[str, list[int]]()
        for index, record in enumerate(records):
            for product in record.products.values():
                totals.setdefault(_family(product.name), [0] * len(records))[index] += product.count
        items = _item_counts(records[0].parameters)
        visited = {name: max(1, round(self.growth(counts).factor)) for name, counts in totals.items()}
        return {name: count for name, count in visited.items() if count < items.get(name, 1)}

    def _attention(self, records: Sequence[BlockRecord]) -> Iterator[tuple[AttentionSpec, int]]:
        for same in zip(*(record.attention for record in records), strict=False):
            first = same[0]
            queries, keys = (self.growth([each.lengths[side] for each in same]).exponents[2] for side in (0, 1))
            sizes = first.heads, first.key_dim, first.value_dim, first.causal, first.window
            per: tuple[CountedPer, CountedPer] = ("source" if queries else "token", "source" if keys else "token")
            yield AttentionSpec(first.name, *sizes, *per, kv_heads=first.kv_heads), first.operator

    def _unfused(self, records: Sequence[BlockRecord]) -> Iterator[tuple[Any, int]]:
        """Attention of explicit scores: a product of queries and keys, then one with values."""
        scores: tuple[int, int] | None = None  # Heads, and dimension of keys
        for same in zip(*(record.unweighted for record in records), strict=False):
            name, (*_, depth, columns), _, operator = same[0]
            grows = [any(self.growth([each[1][dim] for each in same]).exponents[1:]) for dim in range(4)]
            if grows[1:] == [True, False, True]:
                pairs = self.growth([each[1][0] * each[1][1] * each[1][3] for each in same])
                scores = max(1, ceil(pairs.factor)), depth
                continue
            if grows[1:] == [True, True, False] and scores is not None:
                per = ["source" if self.growth([e[1][dim] for e in same]).exponents[2] else "token" for dim in (1, 2)]
                seen = next((each[2] for each in same if each[2]), None)
                causal, window = seen or (False, None)
                dims = (*scores, columns, causal, window, *per)
                scores = None
                yield AttentionSpec(name.replace("product", "attention"), *dims), operator
                continue
            flops = self.growth([e[1][0] * e[1][1] * e[1][2] * e[1][3] for e in same])
            yield MatmulSpec(name, max(1, round(flops.factor)), 1, flops.per), operator

    def _saved(self, sizes: Sequence[SavedRecord]) -> SavedActivation | SavedAttentionMatrix:
        first = sizes[0]
        growth = self.growth([each.elements for each in sizes])
        dtype = self._dtype(first.dtype)
        rows, tokens, source = growth.exponents
        if tokens + source < 2:
            elements = max(1, round(growth.factor))
            return SavedActivation(first.name, elements, growth.per, dtype, kernel=first.kernel)
        queries: CountedPer = "token" if tokens else "source"
        keys: CountedPer = "source" if source else "token"
        return SavedAttentionMatrix(
            first.name,
            max(1, round(growth.factor)),
            rows="all" if rows else "one",
            queries=queries,
            keys=keys,
            dtype=dtype,
        )


def _matched(lists: Sequence[list[SavedRecord]]) -> Iterator[list[SavedRecord]]:
    """The same tensor at all sizes: by its name, and its number among tensors of that name."""
    numbered = [dict[tuple[str, int], SavedRecord]() for _ in lists]
    for records, named in zip(lists, numbered, strict=True):
        for record in records:
            number = sum(name == record.name for name, _ in named)
            named[record.name, number] = record
    for key, record in numbered[0].items():
        yield [named.get(key, record) for named in numbered]


def _family(name: str) -> str:
    """The name without the index of an item of the outermost list."""
    return _ITEM.sub("*", name, count=1)


def _item_counts(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of items of a list inside of a block that have a parameter of the same name and shape."""
    counts, seen = dict[str, int](), dict[str, tuple[int, ...]]()
    for name, shape in shapes.items():
        family = _family(name)
        if family != name and seen.setdefault(family, shape) == shape:
            counts[family] = counts.get(family, 0) + 1
    return counts


def _parameters(record: BlockRecord, routed: dict[str, int]) -> tuple[ParameterSpec, ...]:
    """Parameters by name; those of experts that tokens are sent to are one tensor, with a dimension of experts."""
    shapes = record.parameters
    items, result = _item_counts(shapes), dict[str, ParameterSpec]()
    modules = {name.rpartition(".")[0]: visited for name, visited in routed.items()}
    experts = {shapes[name][0] for name in routed if name in shapes}
    for name, shape in shapes.items():
        family = _family(name)
        visited = modules.get(name.rpartition(".")[0])
        if (family_visited := modules.get(family.rpartition(".")[0])) and items.get(family, 1) > 1:
            full = items[family], *shape
            key, made = family, ParameterSpec(_expert_name(family), full, Fraction(family_visited, items[family]))
        elif visited and shape[0] in experts:
            key, made = name, ParameterSpec(_expert_name(name), shape, Fraction(visited, shape[0]))
        else:
            key, made = name, ParameterSpec(name, shape)
        result[key] = replace(made, gradient="none") if name in record.frozen else made
    return tuple(result.values())


def _expert_name(name: str) -> str:
    """A name that marks the parameter as an expert's (plan/planned_step.py)."""
    return name if ".experts." in f".{name}" else f"experts.{name}"


def _with_runs(spec: ModelSpec) -> ModelSpec:
    """Equal blocks that follow one another as one with repetitions. Equal ones elsewhere have the same name."""
    runs, kinds = list[BlockSpec](), dict[str, list[BlockSpec]]()
    for block in spec.blocks:
        if block.input is None and "." not in block.name:
            runs.append(block)
            continue
        items, _, index = block.name.rpartition(".")
        first = int(index) if index.isdigit() else 0
        known = kinds.setdefault(items, [])
        anonymous = replace(block, name="", first_index=0)
        if anonymous not in known:
            known.append(anonymous)
        kind = known.index(anonymous)
        name, prefix = f"{items} {kind + 1}" if kind else items, f"{items}.{{i}}."
        last = runs[-1] if runs else None
        if last and (last.name, last.prefix, last.first_index + last.repeat) == (name, prefix, first):
            runs[-1] = replace(last, repeat=last.repeat + 1)
        else:
            runs.append(replace(block, name=name, prefix=prefix, first_index=first))
    return replace(spec, blocks=tuple(runs))
