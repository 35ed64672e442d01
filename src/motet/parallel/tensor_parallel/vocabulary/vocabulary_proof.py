"""The split of a module's vocabulary over ranks, proven by running the shards.

Everything runs in one process, on the CPU and in float64, with random parameters. What is not proven stays whole.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import LOSS, TENSOR_DIMENSION, BoundaryComm, ShardRule
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.proof.part_proof import PartProof
from motet.parallel.proof.part_run import Forward, PartProposal
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.split_regions import WholeRegion
from motet.parallel.tensor_parallel.vocabulary.vocabulary_layers import (
    VocabularyLayer,
    find_layers,
    known_problem,
    tied_layer,
)


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
            raise ProofMismatchError("what comes after it has no gradient", module=head.name)
        if others := partial_names.difference(head.whole_tensors):
            problem = f"the gradient of {min(others)}, which comes after it, is another on shards"
            raise ProofMismatchError(problem, module=head.name)
    return partial_names


def _problems_of(mismatch: ProofMismatchError, layers: Sequence[VocabularyLayer]) -> dict[VocabularyLayer, str]:
    """The layers that a mismatch is about. The input of the head is that of the whole, so what follows depends on it
    alone; an input that differs is a problem of the lookups."""
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
