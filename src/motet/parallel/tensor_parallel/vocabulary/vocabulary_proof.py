"""The split of a module's vocabulary over ranks, proven by running the shards.

Everything runs in one process, on the CPU and in float64, with random parameters. Tensors without a proof stay whole.

The layers of a module that have entries of a vocabulary, found by running it: lookups in tables, and the head.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import LOSS, TENSOR_DIMENSION, BoundaryComm, DimensionSplit, ShardRule
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.proof.module_calls import Arguments, CallObserver
from motet.parallel.proof.part_proof import Forward, PartProof, PartProposal
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.split_proposals import output_dim_of_weight
from motet.parallel.tensor_parallel.split_regions import WholeRegion

# Options of a lookup that depend on more than the rows of its ids.
_UNSPLIT_OPTIONS = {
    "max_norm": "renormalises rows in every forward",
    "sparse": "has sparse gradients",
    "scale_grad_by_freq": "divides gradients by the frequency of ids",
}


class VocabularyLayer(NamedTuple):
    """A lookup in a table, or the head."""

    name: str
    is_head: bool
    entries: int
    dims: tuple[tuple[str, int], ...]  # Logical names of its split tensors, the weight first, and the dims of entries
    whole_tensors: tuple[str, ...]  # Its other parameters

    @property
    def splits(self) -> dict[str, DimensionSplit]:
        return {name: DimensionSplit(dim, TENSOR_DIMENSION) for name, dim in self.dims}


class _VocabularyObserver(CallObserver):
    """Finds lookups and linear layers among the innermost modules, in the order of their last calls."""

    def __init__(self, module: nn.Module) -> None:
        leaves = {name: part for name, part in module.named_modules() if not any(True for _ in part.children())}
        super().__init__(leaves)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.layers = dict[str, VocabularyLayer]()

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        layer, inputs, names = self.modules[name], [*arguments.values()], self.names
        if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            return output
        # Parameters may be arguments of a layer without parameters, as where the head is the table.
        tensors = {
            names[p]: p
            for p in (*layer._parameters.values(), *inputs[1:])
            if isinstance(p, nn.Parameter) and p in names
        }
        weight_name, weight = next(((n, p) for n, p in tensors.items() if p.ndim == 2), ("", None))
        is_head = inputs[0].is_floating_point()
        if weight is None or (is_head and 0 not in arguments):
            return output
        biases = [p for p in tensors.values() if p.ndim == 1]
        if is_head:
            dim = output_dim_of_weight(layer, inputs, weight, biases=biases)
        else:
            dim = _lookup_dim(inputs, output, weight)
        if dim is not None:
            entries = weight.shape[dim]
            dims = [(weight_name, dim), *((n, 0) for n, p in tensors.items() if n != weight_name and len(p) == entries)]
            others = tensors.keys() - dict(dims).keys()
            self.layers.pop(name, None)
            self.layers[name] = VocabularyLayer(name, is_head, entries, tuple(dims), tuple(sorted(others)))
        return output


def find_layers(
    module: nn.Module, forward: Callable[[], Tensor], input_entries: int | None, *, gathers_logits: bool
) -> tuple[list[VocabularyLayer], dict[VocabularyLayer, str]]:
    """The lookups and the head of a forward, and a reason where there is no head."""
    observer = _VocabularyObserver(module)
    with torch.no_grad(), observer.hooked():
        result = forward()
    called = observer.layers
    sizes, tables = {input_entries, *result.shape[2:][-1:]}, _declared_tables(module, observer.names)
    if gathers_logits and sizes <= {None}:  # A loss does not show the number of its logits' entries
        *_, last = (None, *(layer.entries for layer in called.values() if layer.is_head))
        sizes |= {layer.entries for layer in called.values() if not layer.is_head and layer.entries == last}
    lookups = [layer for layer in called.values() if not layer.is_head and (layer.entries in sizes or tables)]
    problems = {
        layer: "is not the table that the module names as that of its input"
        for layer in lookups
        if tables and layer.dims[0][0] not in tables and layer.entries in sizes
    }
    lookups = [layer for layer in lookups if not tables or layer.dims[0][0] in tables]
    # The output of a forward may be features of any width, unless it is known to be logits.
    sizes = {input_entries, *(layer.entries for layer in lookups)} if gathers_logits else {*result.shape[2:][-1:]}
    heads = [layer for layer in called.values() if layer.is_head and layer.entries in sizes][-1:]
    problems |= {head: "is called several times in a forward" for head in heads if observer.counts[head.name] > 1}
    if not heads and (sizes - {None} if gathers_logits else result.ndim > 2):  # Classes of rows are few
        unknown_head = VocabularyLayer("", True, 0, (), ())
        problems[unknown_head] = "no layer computes its logits as x W + b, up to element-wise operations"
    return [*lookups, *heads], problems


def _lookup_dim(inputs: Sequence[Any], output: Tensor, weight: Tensor) -> int | None:
    has_shape = output.shape == (*inputs[0].shape, weight.shape[1])
    return 0 if len(inputs) == 1 and has_shape and inputs[0].dtype in (torch.int64, torch.int32) else None


def _declared_tables(module: Any, names: Mapping[nn.Parameter, str]) -> set[str]:
    """The table of the input, where the module names it as those of transformers do."""
    if not hasattr(module, "get_input_embeddings"):
        return set()
    try:
        return {names[module.get_input_embeddings().weight]}
    # transformers raises NotImplementedError for a model without a table; another table may not be a parameter.
    except (NotImplementedError, AttributeError, KeyError):
        return set()


def known_problem(module: nn.Module, layer: VocabularyLayer, degree: int) -> str | None:
    if layer.entries < degree:
        return f"{layer.entries} entries cannot be split over {TENSOR_DIMENSION} = {degree}"
    part = module.get_submodule(layer.name)
    return next(
        (f"{option}: it {text}" for option, text in _UNSPLIT_OPTIONS.items() if getattr(part, option, None)), None
    )


def tied_layer(layer: VocabularyLayer, layers: Collection[VocabularyLayer]) -> VocabularyLayer | None:
    """One of some layers that is this one, or has a split tensor in common with it."""
    return next((each for each in layers if each == layer or dict(each.dims).keys() & dict(layer.dims).keys()), None)


@dataclass(frozen=True)
class VocabularySplit:
    """The tensors of a module that are split by entries of the vocabulary, and lookups and heads that stay whole."""

    rules: Mapping[str, ShardRule] = field(default_factory=dict)
    boundary_comms: tuple[BoundaryComm, ...] = ()
    head_tensors: tuple[str, ...] = ()  # As in a `ModelSharding`
    whole_regions: tuple[WholeRegion, ...] = ()


def prove_vocabulary(
    module: nn.Module,
    forwards: Sequence[Callable[[], Tensor]],
    degree: int,
    *,
    input_entries: int | None = None,
    gathers_logits: bool = False,
) -> VocabularySplit:
    """The split of a module's vocabulary over `degree` ranks.

    The forwards differ in length and return logits [R, T, V], of which a rank will have its entries. With
    `gathers_logits` the output of the head is gathered, and forwards may return any tensor, such as a loss.
    `input_entries` is the size of the vocabulary that the module reads, where that is known.
    """
    partial_names = frozenset[str]()
    with random_values(module):
        layers, problems = find_layers(module, forwards[0], input_entries, gathers_logits=gathers_logits)
        problems |= {layer: text for layer in layers if (text := known_problem(module, layer, degree))}
        lookups = (_border_lookup(module, each, degree) for each in layers if not each.is_head and each not in problems)
        proof = PartProof(module, [*forwards, *lookups], degree, _same_random_numbers)
        while remaining := [layer for layer in layers if not tied_layer(layer, problems)]:
            comms = tuple(_boundary_comms(remaining, gathers_logits=gathers_logits))
            try:
                partial_names = _compare(proof, remaining, comms)
                break
            except ProofMismatchError as mismatch:
                problems |= _problems_of(mismatch, remaining)
            proof.forget()
    for layer in layers:
        if layer not in problems and (tied := tied_layer(layer, problems)):
            problems[layer] = f"shares its weight with {tied.name}, which stays whole"
    whole_regions = tuple(WholeRegion(layer.name, text) for layer, text in problems.items())
    head_tensors = tuple(name for layer in remaining if layer.is_head for name, _ in layer.dims)
    rules = _rules(remaining, partial_names, degree)
    return VocabularySplit(rules, comms if remaining else (), head_tensors, whole_regions)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _border_lookup(module: nn.Module, layer: VocabularyLayer, degree: int) -> Forward:
    """A lookup of the first and the last entry of each rank, and of the entry that stands for padding."""
    table: Any = module.get_submodule(layer.name)
    split = next(iter(layer.splits.values()))
    spans = [split.local_spans(layer.entries, ranks=degree, index=rank)[0][0] for rank in range(degree)]
    ids = [bound for start, stop in spans if start < stop for bound in (start, stop - 1)]
    ids += [0 if getattr(table, "padding_idx", None) is None else table.padding_idx % layer.entries]
    return lambda: table(torch.tensor([ids]))


def _compare(proof: PartProof, layers: Sequence[VocabularyLayer], comms: tuple[BoundaryComm, ...]) -> frozenset[str]:
    """The names of whole parameters of the head whose gradients are partial sums; raises ProofMismatchError."""
    splits = {name: split for layer in layers for name, split in layer.splits.items()}
    lookups = {layer.name: layer.dims[0][0] for layer in layers if not layer.is_head}
    partial_names = proof.compare(PartProposal(comms, splits, lookups=lookups, differentiates_inputs=False))
    for head in (layer for layer in layers if layer.is_head):
        if not proof.has_gradient(head.name):
            raise ProofMismatchError("the computation after it has no gradient", module=head.name)
        if others := partial_names.difference(head.whole_tensors):
            problem = f"the gradient of {min(others)}, which comes after it, differs on shards"
            raise ProofMismatchError(problem, module=head.name)
    return partial_names


def _problems_of(mismatch: ProofMismatchError, layers: Sequence[VocabularyLayer]) -> dict[VocabularyLayer, str]:
    """The layers that a mismatch is about. The input of the head is that of the whole, so later values depend on the
    head alone; an input that differs is a problem of the lookups."""
    lookups, heads = ([layer for layer in layers if layer.is_head == is_head] for is_head in (False, True))
    about = [layer for layer in layers if mismatch.tensor in layer.splits]  # Their gradients
    about = about or [layer for layer in layers if (mismatch.module, mismatch.tensor) == (layer.name, "output")]
    if not about and mismatch.tensor != "input":
        is_other_gradient = mismatch.tensor and not mismatch.module
        about = [head for head in heads if is_other_gradient or mismatch.module == head.name]
    reads_table = "something besides lookups reads the table: " if mismatch.tensor == "input" else ""
    return dict.fromkeys(about or lookups or heads, f"{reads_table}{mismatch}")


def _rules(layers: Sequence[VocabularyLayer], partial_names: Collection[str], degree: int) -> dict[str, ShardRule]:
    rules = dict[str, ShardRule]()
    for layer in layers:
        padding = -layer.entries % degree
        reason = f"{layer.entries} entries of a vocabulary" + f", and {padding} of padding" * bool(padding)
        rules |= {name: ShardRule((split,), reason=f"{reason}; proven") for name, split in layer.splits.items()}
        for name in (name for name in layer.whole_tensors if name in partial_names):
            over = (*ShardRule().partial_over, TENSOR_DIMENSION)
            rules[name] = ShardRule(partial_over=over, reason=f"whole, and read by a rank's entries of {layer.name}")
    return rules


def _boundary_comms(layers: Sequence[VocabularyLayer], *, gathers_logits: bool) -> Iterator[BoundaryComm]:
    for layer in layers:
        if not layer.is_head:
            yield BoundaryComm(layer.name, "output", 0, "sum", TENSOR_DIMENSION)
            continue
        yield BoundaryComm(layer.name, "input", 0, "copy", TENSOR_DIMENSION)
        if gathers_logits:
            yield BoundaryComm(layer.name, "output", 0, "gather", TENSOR_DIMENSION)
        else:
            yield BoundaryComm(layer.name, "output", LOSS, "sum", TENSOR_DIMENSION)
