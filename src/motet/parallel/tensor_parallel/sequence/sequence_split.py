"""Sequence parallelism: the residual stream of a list of blocks is split along tokens, where a proof allows it.

Each rank holds a piece of the sequence from the input of the first block to the output of the last. Column layers
gather the pieces, row layers reduce-scatter their sums, and a module that mixes tokens but is not split gets the whole
sequence. Which communication a list of blocks needs is found by running it on pieces (piece_forward.py). Where a piece
computes something else than the whole, the communication around that place is changed, until nothing differs. If
nothing is left to change, the stream stays whole, and a sentence says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from motet.models.blocks import named_blocks
from motet.parallel.model_sharding import TENSOR_DIMENSION, ActivationSplit, BoundaryComm, ShardRule
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.proof.part_proof import PartProof
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.sequence.block_stream import BlockStream
from motet.parallel.tensor_parallel.sequence.piece_forward import (
    CallRecord,
    failure_on_piece,
    record_forward,
    same_dropout,
)
from motet.parallel.tensor_parallel.split_regions import ProvenSplits, WholeRegion

_MIXES_TOKENS = "it computes a token from others, so every rank computes it for the whole sequence"


@dataclass(frozen=True)
class SequenceSplit:
    """The split of residual streams along tokens. Regions outside of `blocks` communicate as they do without it."""

    blocks: tuple[str, ...] = ()  # Blocks whose stream is split
    boundary_comms: tuple[BoundaryComm, ...] = ()  # Of these blocks, in the order of a forward
    activations: tuple[ActivationSplit, ...] = ()
    rules: Mapping[str, ShardRule] = field(default_factory=dict)  # Of parameters of these blocks outside of regions
    unsplit: tuple[WholeRegion, ...] = ()  # Lists of blocks whose stream is not split, and modules that mix tokens


def prove_sequence_split(
    module: nn.Module, forwards: Sequence[Callable[[], Tensor]], splits: ProvenSplits, *, degree: int, rows: int = 1
) -> SequenceSplit:
    """Split the stream of each list of blocks that computes on `degree` pieces what it computes on the whole.

    `forwards` run the module on `rows` sequences of two lengths that the degree divides.
    """
    streams, unsplit = list[BlockStream](), list[WholeRegion]()
    with random_values(module):
        proof = PartProof(module, forwards, degree, partial(same_dropout, rows, module), rows)
        records = [record_forward(module, forward, rows) for forward in forwards]
        for name, blocks in _lists_of_blocks(module, records[0]).items():
            stream = BlockStream(module, blocks, splits.regions, records=records)
            problem = stream.problem(degree) or _complete([*streams, stream], forwards, degree)
            problem = problem or _gradient_problem(stream, proof)
            if problem is None:
                streams.append(stream)
                unsplit += [WholeRegion(inner, _MIXES_TOKENS) for inner in stream.mixing_modules()]
            else:
                unsplit.append(WholeRegion(name, f"its residual stream is not split along tokens: {problem}"))
    return SequenceSplit(
        tuple(name for stream in streams for name in stream.blocks),
        tuple(comm for stream in streams for comm in stream.comms()),
        tuple(entry for stream in streams for entry in stream.activations()),
        {name: rule for stream in streams for name, rule in stream.rules().items()},
        tuple(unsplit),
    )


def _lists_of_blocks(module: nn.Module, record: CallRecord) -> dict[str, list[str]]:
    """The names of the blocks that run, in the order in which they do, by the name of their list."""
    called = [name for name in named_blocks(module) if name in record.calls]
    lists: dict[str, list[str]] = {}
    for name in sorted(called, key=lambda name: record.calls[name][0].place):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    return lists


def _complete(streams: Sequence[BlockStream], forwards: Sequence[Callable[[], Tensor]], degree: int) -> str | None:
    """Change the communication of the last stream until pieces compute what the whole does, or say why they cannot."""
    *_, stream = streams
    while True:
        comms = [comm for each in streams for comm in each.comms()]
        runs = ((f, r, i) for f, r in zip(forwards, stream.records, strict=True) for i in {degree - 1, 0})
        failures = (failure_on_piece(stream.module, f, r, comms=comms, index=i, degree=degree) for f, r, i in runs)
        failure = next((failure for failure in failures if failure), None)
        if failure is None:
            return None
        if not stream.change_comms(failure):
            return f"{failure.module or 'the model'} computes something else on a part of the tokens: {failure.problem}"


def _gradient_problem(stream: BlockStream, proof: PartProof) -> str | None:
    """A parameter whose gradients on ranks are neither parts of a sum nor complete where they must be, in words."""
    partial_names = stream.rules().keys() | {
        name
        for region in stream.regions
        for name, rule in region.rules.items()
        if TENSOR_DIMENSION in rule.partial_over
    }
    try:
        sums = proof.partial_sums(stream.proposal())
    except ProofMismatchError as mismatch:
        return str(mismatch)
    wrong = (name for name, is_partial in sums.items() if is_partial != (name in partial_names))
    return next((f"the gradient of {name} does not follow from those of parts of the tokens" for name in wrong), None)
