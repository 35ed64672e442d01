"""Ways in which a region may be split, cheap and possibly wrong: only the proof decides.

A way splits the outputs of the column layers, the inputs of the row layers, and perhaps tensors with one entry a head
or a column; and it replaces integer attributes whose value is a width or a number of heads.

Linear layers of a module, found by running it, and the regions in which they may be split together.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import combinations, groupby, islice, product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.torch_private import InterceptedFunctions
from motet.parallel.model_sharding import TENSOR_DIMENSION, DimensionSplit, InputWidth
from motet.parallel.proof.comparison import SourceLine, is_close
from motet.parallel.proof.module_calls import Arguments, CallObserver
from motet.parallel.proof.part_proof import Forward, PartProposal
from motet.parallel.tensor_parallel.split_regions import LayerSplit, LocalAttribute, region_comms


@dataclass(frozen=True)
class LinearLayer:
    """A layer that computes x W + b, with a weight of [in, out] or [out, in]."""

    name: str
    out_dim: int  # Dimension of the weight
    in_width: int
    out_width: int
    has_adapter: bool


@dataclass(frozen=True)
class LayerCall:
    """A call of a linear layer in a forward; calls with the same `source` read the same tensor."""

    layer: str
    source: int
    views: int  # Number of older entries of `ObservedForward.views`


@dataclass
class ObservedForward:
    """The calls of linear layers in a forward, and the shapes to which tensors were reshaped."""

    layers: dict[str, LinearLayer] = field(default_factory=dict)
    calls: list[LayerCall] = field(default_factory=list)
    views: list[torch.Size] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)  # Modules that ran, and how often
    # (module, linear layer in it) -> the argument of the module that the layer reads
    handed_on: dict[tuple[str, str], int | str] = field(default_factory=dict)
    # (running module, module, integer attribute or `config.NAME`, value) for each attribute that was read
    reads: dict[tuple[str, str, str, int], None] = field(default_factory=dict)


@dataclass(frozen=True)
class CandidateRegion:
    """Layers that may be split together: groups that read one tensor each by columns, and the next layer by rows."""

    module: str
    columns: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]
    copies: tuple[str, ...] = ()  # Modules without parameters that get a whole tensor of which each rank uses a part

    @property
    def readers(self) -> tuple[tuple[str, ...], ...]:
        """The modules that read each tensor that enters the region."""
        return (*self.columns, *((name,) for name in self.copies))

    @property
    def layers(self) -> tuple[str, ...]:
        """All of its layers."""
        return (*(name for group in self.columns for name in group), *self.rows)


class _LayerObserver(CallObserver):
    """Finds the linear layers among the modules that run, and notes the integers that they read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(dict(module.named_modules()))
        self.observed = ObservedForward(called=self.counts)
        self._sources = dict[int, Tensor]()  # Kept, so that no other tensor gets the number of one
        self._entered = dict[str, Arguments]()  # Arguments of running modules

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        self._entered[name] = arguments
        return arguments

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        layer, x, layers = self.modules[name], arguments.get(0) if len(arguments) == 1 else None, self.observed.layers
        if isinstance(x, Tensor) and x.is_floating_point() and _may_be_linear(layer):
            if name not in layers and (linear := _as_linear_layer(layer, name, x)):
                layers[name] = linear
            if name in layers:
                self._sources[id(x)] = x
                self.observed.calls.append(LayerCall(name, id(x), len(self.observed.views)))
                for around in self.running[:-1]:
                    for key, value in self._entered.get(around, {}).items():
                        if value is x:
                            self.observed.handed_on.setdefault((around, name), key)
        self._entered.pop(name, None)
        return output

    def read(self, holders: Sequence[tuple[str, str]], name: str, value: object) -> None:
        """Note the value of an attribute that the running module reads."""
        if type(value) is int and value > 1:
            readers = self.running[-1:] or [path for path, _ in holders]
            self.observed.reads.update(
                {(reader, path, prefix + name, value): None for reader in readers for path, prefix in holders}
            )


def observe_forward(module: nn.Module, forward: Forward) -> ObservedForward:
    """Run a forward and find the linear layers in it, and the integer attributes that it reads."""
    observer = _LayerObserver(module)
    names = {part: name for name, part in observer.modules.items()}
    with torch.no_grad(), observer.hooked(), ExitStack() as stack:
        for part, name in names.items():
            stack.enter_context(_reads_observed(part, partial(observer.read, [(name, "")])))
        for config, holders in _plain_objects(names).values():
            stack.enter_context(_reads_observed(config, partial(observer.read, holders)))
        with InterceptedFunctions(partial(_note_reshape, observer.observed.views)):
            forward()
    return observer.observed


def _note_reshape(views: list[torch.Size], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch. The shapes to which tensors are reshaped may be those of heads."""
    result = function(*args, **kwargs)
    if getattr(function, "__name__", "") in ("view", "reshape", "unflatten") and isinstance(result, Tensor):
        views.append(result.shape)
    return result


def _plain_objects(names: Mapping[nn.Module, str]) -> dict[int, tuple[Any, list[tuple[str, str]]]]:
    """Objects with attributes that modules refer to, such as a config, and (module, `NAME.`) for each reference."""
    objects = dict[int, tuple[Any, list[tuple[str, str]]]]()
    for part, path in names.items():
        for name, value in vars(part).items():
            is_plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor | ModuleType)
            if is_plain and not name.startswith("_"):
                objects.setdefault(id(value), (value, []))[1].append((path, f"{name}."))
    return objects


@contextmanager
def _reads_observed(holder: Any, read: Callable[[str, object], None]) -> Iterator[None]:
    """Call `read` with each attribute of an object that is read."""
    kind: Any = type(holder)

    def observe(self: Any, name: str) -> object:
        value = kind.__getattribute__(self, name)
        read(name, value)
        return value

    try:
        object.__setattr__(holder, "__class__", type(kind.__name__, (kind,), {"__getattribute__": observe}))
    except TypeError:  # A built-in type, such as SimpleNamespace: its reads cannot be seen, and may be any
        for name, value in vars(holder).items():
            read(name, value)
    try:
        yield
    finally:
        if type(holder) is not kind:
            object.__setattr__(holder, "__class__", kind)


def _may_be_linear(layer: nn.Module) -> bool:
    parameters = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    is_small = not any(True for _ in layer.children()) and set(parameters) <= {
        "weight",
        "bias",
        "adapter_a",
        "adapter_b",
    }
    return is_small and weight is not None and weight.dim() == 2 and (bias is None or bias.dim() == 1)


def _as_linear_layer(layer: Any, name: str, x: Tensor) -> LinearLayer | None:
    """The layer, if its forward multiplies its input by its weight."""
    bias = getattr(layer, "bias", None)
    out_dim = output_dim_of_weight(layer, [x], layer.weight, biases=[] if bias is None else [bias])
    if out_dim is None:
        return None
    in_width, out_width = layer.weight.shape[1 - out_dim], layer.weight.shape[out_dim]
    return LinearLayer(name, out_dim, in_width, out_width, has_adapter="adapter_a" in layer._parameters)


def output_dim_of_weight(
    layer: nn.Module, inputs: Sequence[Any], weight: Tensor, *, biases: Sequence[Tensor]
) -> int | None:
    """The dimension of the weight along the output of a layer that computes x W + b; None for another layer."""
    x, output = inputs[0], layer.forward(*inputs)  # Without hooks, such as adapters, which would add to it
    for dim, matrix in enumerate((weight.T, weight)):
        if x.shape[-1] == matrix.shape[0] and x.dtype == weight.dtype and is_close(output, sum(biases, x @ matrix)):
            return dim
    return None


def candidate_regions(observed: ObservedForward, module: str, taken: Collection[str]) -> Iterator[CandidateRegion]:
    """Regions of the layers in a module that are not `taken`: a layer by rows, and one to three groups before it.

    The nearest groups come first. A layer is in the group of the layers that read the same tensor. Last come groups
    with one between them that stays whole, such as the layer that makes a short vector of keys and values.
    """
    groups = _groups(observed, module, taken)
    for places in ((1,), (2, 1), (3, 2, 1), (3, 1)):
        for last in range(max(places), len(groups)):
            columns = tuple(groups[last - place] for place in places)
            rows = groups[last]
            if len(rows) == 1 and not any(rows[0] in group for group in columns):
                yield CandidateRegion(module, columns, rows)


def _groups(observed: ObservedForward, module: str, taken: Collection[str]) -> list[tuple[str, ...]]:
    calls = [call for call in observed.calls if is_inside(call.layer, module) and call.layer not in taken]
    groups = [tuple(dict.fromkeys(call.layer for call in same)) for _, same in groupby(calls, lambda call: call.source)]
    return list(dict.fromkeys(groups))


def is_inside(name: str, module: str) -> bool:
    """Whether a module or tensor is in a module."""
    return not module or name == module or name.startswith(f"{module}.")


def head_sizes(observed: ObservedForward, region: CandidateRegion) -> list[int]:
    """Likely sizes of a head, of which the row layers read several: last sizes of tensors that were reshaped."""
    inner = observed.layers[region.rows[0]].in_width
    widths = {inner, *(observed.layers[name].out_width for group in region.columns for name in group)}
    at = [index for index, call in enumerate(observed.calls) if call.layer in region.layers]
    counts: Counter[int] = Counter()
    for shape in observed.views[observed.calls[at[0]].views : observed.calls[at[-1]].views]:
        is_width = len(shape) >= 3 and shape[-1] * shape[-2] in widths
        if len(shape) >= 3 and 1 < shape[-1] < inner and inner % shape[-1] == 0:
            counts[shape[-1]] += 100 if is_width else len(shape) > 3
        elif is_width and 1 < shape[-2] < inner and inner % shape[-2] == 0:  # Queries, keys and values of a head
            counts[inner // shape[-2]] += 100
    return [size for size, count in counts.most_common() if count]


def structure(module: nn.Module) -> tuple[object, ...]:
    """A value that is equal for modules that compute the same with other parameters, such as layers of a stack."""
    parts = list[object]()
    for name, part in module.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str)
            and not any(word in key for word in ("layer", "idx", "index", "training"))
        )
        shapes = sorted((key, p.shape) for key, p in part._parameters.items() if p is not None)
        parts.append((name, type(part), tuple(plain), tuple(shapes)))
    return tuple(parts)


def modules_bottom_up(module: nn.Module) -> Sequence[str]:
    """Names of modules, each after the modules inside of it."""
    names = [name for name, _ in module.named_modules()]
    return sorted(names, key=lambda name: -(name.count(".") + 1 if name else 0))


MOST_ATTRIBUTES = 3  # Attributes of a subset that is tried
MOST_SUBSETS = 40
MOST_WITH_WIDTHS = 4  # Choices of attributes that are tried with other widths of inputs
MOST_TABLES = 10


@dataclass(frozen=True)
class SplitProposal:
    """One way to split a region."""

    region: CandidateRegion
    splits: Mapping[str, DimensionSplit]  # By the name of the tensor
    attributes: tuple[LocalAttribute, ...] = ()
    input_widths: tuple[InputWidth, ...] = ()
    input_splits: Mapping[str, DimensionSplit] = field(default_factory=dict)  # Splits of row layers' inputs
    spare: tuple[LocalAttribute, ...] = ()  # Numbers of heads that these forwards do not read, but others may

    def inner_splits(self, observed: ObservedForward) -> Iterator[tuple[str, tuple[int, DimensionSplit]]]:
        """The splits of activations between a column layer and the next row layer: (its name, (width, split))."""
        order = [call.layer for call in observed.calls]
        for column in (name for group in self.region.columns for name in group):
            row = next(name for name in order[order.index(column) :] if name in self.region.rows)
            yield column, (observed.layers[row].in_width, self.input_splits[row])


def join_proposals(
    proposals: Sequence[SplitProposal], observed: ObservedForward, *, differentiates_inputs: bool
) -> PartProposal:
    """Several regions, split in these ways, as one proposal."""
    return PartProposal(
        tuple(comm for each in proposals for comm in region_comms(each.region.readers, each.region.rows)),
        {name: split for each in proposals for name, split in each.splits.items()},
        tuple(attribute for each in proposals for attribute in each.attributes),
        tuple(width for each in proposals for width in each.input_widths),
        added_once=tuple(f"{row}.bias" for each in proposals for row in each.region.rows),
        inner={name: split for each in proposals for name, split in each.inner_splits(observed)},
        differentiates_inputs=differentiates_inputs,
    )


@dataclass(frozen=True)
class RegionFacts:
    """A region and the known facts about it, from which ways to split it are proposed."""

    module: nn.Module
    observed: ObservedForward
    region: CandidateRegion
    degree: int
    aliased: frozenset[str]  # Parameters with several names

    @property
    def layers(self) -> Mapping[str, LinearLayer]:
        """The linear layers of the module, by name."""
        return self.observed.layers


def propose_splits(facts: RegionFacts, problems: list[str]) -> Iterator[SplitProposal]:
    """Ways to split a region, the likely ones first. `problems` gets the reasons why sizes cannot be split."""
    columns = [facts.layers[name] for group in facts.region.columns for name in group]
    inner = facts.layers[facts.region.rows[0]].in_width
    for unit in (*head_sizes(facts.observed, facts.region), 1):
        is_alone = unit > 1 and len(columns) == 1  # Then one product has queries, keys and values
        by_layer = product(*(_fused_parts(layer.out_width, inner, unit, has_keys=is_alone) for layer in columns))
        for index, parts in enumerate(by_layer):
            splits = {layer.name: split_of(-1, each, unit=unit) for layer, each in zip(columns, parts, strict=True)}
            yield from _with_columns(facts, splits, unit, problems=problems)
            widths = [layer.out_width for layer in columns]
            if index == 0 and len(columns) > 1 and not any(width % (inner // unit) for width in widths):
                # As many heads in each layer, of different sizes, such as those of latent attention
                sizes = {layer.name: split_of(-1, unit=layer.out_width * unit // inner) for layer in columns}
                yield from islice(_with_columns(facts, sizes, unit, problems=[]), 1)


def _with_columns(
    facts: RegionFacts, columns: Mapping[str, DimensionSplit], unit: int, *, problems: list[str]
) -> Iterator[SplitProposal]:
    """Ways to split a region whose column layers are split in this way, and whose row layers read heads of `unit`."""
    inner = facts.layers[facts.region.rows[0]].in_width
    widths = [(facts.layers[name].out_width, split) for name, split in columns.items()]
    try:
        local = _LocalSizes(inner, widths, facts.degree, unit=unit)
    except InputError as error:
        units = "heads of {unit} elements" if unit > 1 else "elements"
        problems.append(str(error).replace(f"units of {unit} elements", units.format(unit=unit)))
        return
    yield from _with_attributes(facts, columns, local)


def _fused_parts(width: int, inner: int, unit: int, *, has_keys: bool) -> list[tuple[int, ...]]:
    """Lengths of the parts of one product, of which the row layer reads `inner` values; () is one part."""
    keys = (width - inner) // 2
    fused = [(inner, keys, keys)] if width > inner and (width - inner) % (2 * unit) == 0 else []
    equal = [(width // count,) * count for count in (2, 3) if width % (count * unit) == 0]
    equal.sort(key=lambda parts: parts[0] != inner)
    likely = [] if width <= inner else [*fused, *equal] if has_keys else [*equal, *fused]
    return list(dict.fromkeys([*likely, (), *equal]))


def split_of(dim: int, parts: tuple[int, ...] = (), *, unit: int = 1) -> DimensionSplit:
    """A split over the tensor-parallel ranks."""
    return DimensionSplit(dim, TENSOR_DIMENSION, parts, unit)


class _LocalSizes:
    """Widths and numbers of heads in a region, each with its value on a rank; raises InputError if there is none."""

    def __init__(self, inner: int, columns: Sequence[tuple[int, DimensionSplit]], degree: int, *, unit: int) -> None:
        self.degree, self.unit = degree, unit
        self.values: dict[int, int] = {}
        self.splits: dict[int, DimensionSplit] = {}  # Split of a dimension by its length
        self._add(inner, split_of(0, unit=self.unit), can_be_shared=False)
        for width, split in columns:
            self._add(width, split, can_be_shared=not split.parts)
            keys = (width - inner) // 2  # Keys of one product with queries, keys and values
            for part in (*split.parts, *([keys] if keys > 0 and keys * 2 + inner == width else [])):
                if part % self.unit == 0 and part // self.unit % degree == 0:
                    self._add(part, split_of(0, unit=self.unit), can_be_shared=False)
        heads = inner // self.unit
        counts = [value for value in self.values if value * self.unit in self.values and heads % value == 0]
        self.heads = {value: self.values[value] for value in counts} if self.unit > 1 else {}
        self.groups = {heads // value: self.values[heads] // local for value, local in self.heads.items()}
        for value, local in self.groups.items():
            self.values.setdefault(value, local)

    def _add(self, width: int, split: DimensionSplit, *, can_be_shared: bool) -> None:
        spans, padding = split.local_spans(width, ranks=self.degree, index=self.degree - 1)
        units = [part // split.unit for part in split.parts or (width,)]
        is_even = all(count % self.degree == 0 for count in units)
        check_input(
            is_even
            or (can_be_shared and self.degree % units[0] == 0)
            or (split.unit == 1 and not split.parts and width >= self.degree),
            f"{' and '.join(map(str, dict.fromkeys(units)))} units of {split.unit} elements cannot be split over "
            f"{TENSOR_DIMENSION} = {self.degree}; use a divisor of {'both' if len(units) > 1 else units[0]}",
        )
        local = sum(stop - start for start, stop in spans) + padding
        for length, local_length, unit in ((width, local, split.unit), (width // split.unit, local // split.unit, 1)):
            if length > 1 and (length == width or split.unit > 1):
                self.values.setdefault(length, local_length)
                self.splits.setdefault(length, split if length == width else split_of(0, unit=unit))


def _with_attributes(
    facts: RegionFacts, columns: Mapping[str, DimensionSplit], local: _LocalSizes
) -> Iterator[SplitProposal]:
    rows = {name: split_of(-1, unit=local.unit) for name in facts.region.rows}
    tensors: dict[str, DimensionSplit] = {}
    for name, split in (*columns.items(), *rows.items()):
        tensors |= _tensors_of_layer(facts.module, facts.layers[name], split, is_column=name in columns)
    choices = list(_attribute_choices(*_attributes(facts, local.values)))
    changes: list[tuple[tuple[LocalAttribute, ...], tuple[InputWidth, ...]]] = [(each, ()) for each in choices]
    if widths := _input_widths(facts):
        changes += [(attributes, widths) for attributes in choices[:MOST_WITH_WIDTHS]]
    for tables in _table_choices(_tables(facts, local.splits)):
        for attributes, widths in changes:
            replaced = {(path, name) for path, name, _ in attributes}
            spare = tuple(each for each in _numbers_of_heads(facts, local) if each[:2] not in replaced)
            yield SplitProposal(facts.region, {**tensors, **tables}, attributes, widths, rows, spare)


def _input_widths(facts: RegionFacts) -> tuple[InputWidth, ...]:
    """The inputs of the region's module that its column layers read, which its code may see as wide as on a rank."""
    module, readers = facts.region.module, dict[int | str, list[str]]()
    for column in (name for group in facts.region.columns for name in group):
        argument = facts.observed.handed_on.get((module, column))
        if argument is not None and facts.layers[column].in_width % facts.degree == 0:
            readers.setdefault(argument, []).append(column)
    return tuple(InputWidth(module, argument, facts.degree, tuple(names)) for argument, names in readers.items())


def advice_on_numbers(line: SourceLine, proposal: SplitProposal, facts: RegionFacts) -> str:
    """The change of a line that would let ranks compute with other numbers of heads, or other widths."""
    row, columns = facts.layers[facts.region.rows[0]], [name for group in facts.region.columns for name in group]
    unit, widths = proposal.input_splits[row.name].unit, [facts.layers[name].out_width for name in columns]
    roles = dict.fromkeys((row.in_width, *widths), "width")
    if unit > 1:
        roles |= {width // unit: "heads" for width in (row.in_width, *widths)}
    if _input_widths(facts):  # The code sees the width of a rank there
        roles.pop(row.in_width, None)
    local = {text: n for text, n in line.local_numbers.items() if roles.get(n) == "width"}  # Others may be lengths
    for numbers in (line.numbers, local):
        names = {text: text.lower() if text.isidentifier() else roles[n] for text, n in numbers.items() if n in roles}
        if names:
            changes = (f"set `self.{name}` to {text} in __init__, write `self.{name}`" for text, name in names.items())
            return (
                f"; a rank needs another value of {' and '.join(names)} in this line, and motet can change attributes "
                f"of the module: {', and '.join(changes)}"
            )
    return ""


def propose_jointly(
    name: str, members: Sequence[RegionFacts], proven: Sequence[SplitProposal]
) -> Iterator[SplitProposal]:
    """Ways to split regions of a module together, and tables with an entry for each head that stand outside of them.

    Layers that share such a table, as attention layers with relative positions may do, cannot be split one by one.
    """
    likely = [list(islice(propose_splits(facts, []), 2)) for facts in members]
    if not all(likely):
        return
    plain = [ways[0] for ways in likely]
    changed = [way for ways in likely for way in ways[-1:]]
    changed = [way if way.splits == first.splits else first for way, first in zip(changed, plain, strict=True)]
    facts, row = members[0], members[0].region.rows[0]
    heads = facts.layers[row].in_width // plain[0].input_splits[row].unit
    region = CandidateRegion(name, (), ())
    tables = _tables(replace(facts, region=region), {heads: split_of(0)})
    inside = {table for proposal in (*plain, *proven) for table in proposal.splits}
    outside = [(table, split) for table, split in tables if table not in inside]
    for chosen in _table_choices(outside):
        for ways in (changed, plain):
            together = (*proven, *ways)
            region = CandidateRegion(
                name,
                tuple(group for way in together for group in way.region.columns),
                tuple(row for way in together for row in way.region.rows),
                tuple(copy for way in together for copy in way.region.copies),
            )
            yield SplitProposal(
                region,
                dict(chosen) | {table: split for way in together for table, split in way.splits.items()},
                tuple(attribute for way in together for attribute in way.attributes),
                tuple(width for way in together for width in way.input_widths),
                {row: split for way in together for row, split in way.input_splits.items()},
                tuple(attribute for way in together for attribute in way.spare),
            )


_ROLES_IN_PLANS: dict[str, LayerSplit] = {
    "columns": "columns",
    "colwise": "columns",
    "packed_colwise": "columns",
    "rows": "rows",
    "rowwise": "rows",
    "packed_rowwise": "rows",
}


def declared_roles(module: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, LayerSplit]:
    """The roles of layers in a plan; by default `tensor_parallel_plan` of modules, or `_tp_plan` of transformers."""
    patterns = dict(plan or {})
    for path, part in module.named_modules() if plan is None else ():
        for attribute in ("_tp_plan", "tensor_parallel_plan"):
            for name, role in (getattr(part, attribute, None) or {}).items():
                patterns[f"{path}.{name}" if path else name] = role
    names = [name for name, part in module.named_modules() if part._parameters]
    return {
        name: _ROLES_IN_PLANS[role]
        for pattern, role in patterns.items()
        if role in _ROLES_IN_PLANS
        for name in names
        if fnmatchcase(name, pattern)
    }


def declared_copies(module: nn.Module) -> list[str]:
    """The modules that `tensor_parallel_plan` of another module declares as readers of a whole tensor."""
    plans = ((path, getattr(part, "tensor_parallel_plan", None) or {}) for path, part in module.named_modules())
    return [f"{path}.{name}".lstrip(".") for path, plan in plans for name, role in plan.items() if role == "copy"]


def split_row_input(module: nn.Module, layer: LinearLayer) -> SplitProposal:
    """The way to split a layer whose input is whole on every rank: each takes a slice, and the outputs are summed."""
    split, region = split_of(-1), CandidateRegion(layer.name, (), (layer.name,))
    return SplitProposal(region, _tensors_of_layer(module, layer, split, is_column=False), (), (), {layer.name: split})


def _tensors_of_layer(
    module: nn.Module, layer: LinearLayer, split: DimensionSplit, *, is_column: bool
) -> dict[str, DimensionSplit]:
    """Parameters of a layer that are split with it, its bias and its adapter too."""
    dims = {"weight": layer.out_dim if is_column else 1 - layer.out_dim}
    if is_column and getattr(module.get_submodule(layer.name), "bias", None) is not None:
        dims["bias"] = 0
    if layer.has_adapter:  # x A^T B^T, with A of [rank, in] and B of [out, rank]
        dims |= {"adapter_b": 0} if is_column else {"adapter_a": 1}
    return {f"{layer.name}.{name}": replace(split, dim=dim) for name, dim in dims.items()}


def _attributes(facts: RegionFacts, local: Mapping[int, int]) -> tuple[list[LocalAttribute], list[LocalAttribute]]:
    """Integer attributes of modules and of configs that the region reads, and the values that replace them."""
    in_modules, in_configs = dict[LocalAttribute, None](), dict[LocalAttribute, None]()
    module = facts.region.module
    for reader, path, name, value in facts.observed.reads:
        is_of_region = is_inside(reader, module) and is_inside(path, module) and path not in facts.region.rows
        if is_of_region and local.get(value, value) != value:
            (in_configs if "." in name else in_modules)[path, name, local[value]] = None
    return list(in_modules), list(in_configs)


def _numbers_of_heads(facts: RegionFacts, local: _LocalSizes) -> Iterator[LocalAttribute]:
    """Integer attributes that are, by their names, numbers of heads or of query heads for each key head."""
    for relative, part in facts.module.get_submodule(facts.region.module).named_modules():
        for name, value in vars(part).items():
            is_count = type(value) is int and ("head" in name or "group" in name)
            values = local.groups if "group" in name else local.heads
            if is_count and not any(word in name for word in ("dim", "size")) and values.get(value, value) != value:
                yield ".".join(filter(None, (facts.region.module, relative))), name, values[value]


def _attribute_choices(
    in_modules: Sequence[LocalAttribute], in_configs: Sequence[LocalAttribute]
) -> Iterator[tuple[LocalAttribute, ...]]:
    every = (*in_modules, *in_configs)
    subsets = [
        subset for size in range(1, min(len(every), MOST_ATTRIBUTES) + 1) for subset in combinations(every, size)
    ]
    yield from dict.fromkeys([(), tuple(in_modules), every, *subsets[:MOST_SUBSETS]])


def _tables(facts: RegionFacts, splits: Mapping[int, DimensionSplit]) -> list[tuple[str, DimensionSplit]]:
    """Parameters outside of linear layers with one entry for each head or column."""
    tables = []
    for relative, parameter in facts.module.get_submodule(facts.region.module).named_parameters():
        name = ".".join(filter(None, (facts.region.module, relative)))
        if name.rpartition(".")[0] not in facts.layers and name not in facts.aliased:
            dims = [dim for dim, length in enumerate(parameter.shape) if length in splits]
            tables += [(name, replace(splits[parameter.shape[dim]], dim=dim)) for dim in dims[-1:]]
    return tables


def _table_choices(tables: Sequence[tuple[str, DimensionSplit]]) -> Iterator[dict[str, DimensionSplit]]:
    subsets = [subset for size in (1, 2) for subset in combinations(tables, size)]
    yield from map(dict, dict.fromkeys([(), tuple(tables), *subsets[:MOST_TABLES]]))
