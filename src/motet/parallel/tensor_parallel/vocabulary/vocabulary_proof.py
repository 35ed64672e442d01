"""The split of a module's vocabulary over ranks, proven by running the shards.

Everything runs in one process, on the CPU and in float64, with random parameters. What is not proven stays whole.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from motet.parallel.model_sharding import LOSS, TENSOR_DIMENSION, BoundaryComm, ShardRule
from motet.parallel.tensor_parallel.proof_values import random_values
from motet.parallel.tensor_parallel.split_regions import WholeRegion
from motet.parallel.tensor_parallel.vocabulary.vocabulary_layers import (
    VocabularyLayer,
    find_layers,
    known_problem,
    tied_layer,
)
from motet.parallel.tensor_parallel.vocabulary.vocabulary_trial import VocabularyMismatchError, VocabularyTrial
from motet.precision.float64_mode import use_float64


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
    partial_names = set[str]()
    with use_float64(), random_values(module):
        layers, problems = find_layers(module, forwards[0], input_entries, gathers_logits=gathers_logits)
        problems |= {layer: text for layer in layers if (text := known_problem(module, layer, degree))}
        trial = VocabularyTrial(module, forwards, degree, gathers_logits=gathers_logits)
        while remaining := [layer for layer in layers if not tied_layer(layer, problems)]:
            try:
                partial_names = trial.compare(remaining)
                break
            except VocabularyMismatchError as mismatch:
                problems |= {layer: str(mismatch) for layer in mismatch.layers}
    for layer in layers:
        if layer not in problems and (tied := tied_layer(layer, problems)):
            problems[layer] = f"shares its weight with {tied.name}, which stays whole"
    whole_regions = tuple(WholeRegion(layer.name, text) for layer, text in problems.items())
    comms = tuple(_boundary_comms(remaining, gathers_logits=gathers_logits))
    head_tensors = tuple(name for layer in remaining if layer.is_head for name, _ in layer.dims)
    return VocabularySplit(_rules(remaining, partial_names, degree), comms, head_tensors, whole_regions)


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
