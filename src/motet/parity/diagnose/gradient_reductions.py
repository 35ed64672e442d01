"""Gradients as ranks gave them to reductions: whether the own gradient of a rank is wrong, or a sum of right ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import AlignedTensorPair
from motet.parity.compare.planned_records import PlannedRecords, format_numbered
from motet.parity.diagnose.linear_fit import MicroBatchContribution
from motet.parity.diagnose.mismatch_evidence import LocatedDifference, MismatchEvidence
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.diagnose.tensor_hypotheses import TENSOR_HYPOTHESES, explain
from motet.parity.record.tensor_recorder import RankKind, RecordedShard, RecordedTensor, TensorKey, sketch_shard


class ReductionInput(NamedTuple):
    """The gradient of one parameter that a rank gave to a reduction, of one micro-batch or of all."""

    rank: int
    record: RecordedTensor
    shard: RecordedShard
    results: Sequence[MicroBatchResult]  # Of one device, for the micro-batches that are in it

    def cut(self, gradient: Tensor) -> Tensor:
        """The same elements of an unsharded gradient."""
        return sketch_shard(self.shard.cut(gradient), self.shard.start)


def _reduction_inputs(located: LocatedDifference, planned: PlannedRecords, kind: RankKind) -> Iterator[ReductionInput]:
    name, data_rank = located.key.name, located.recompute.layout.data_rank
    by_microbatch: dict[tuple[int, int], list[RecordedTensor]] = {}
    for rank, record in located.records_by_key.get(TensorKey(kind, name), []):
        by_microbatch.setdefault((rank, record.microbatch), []).append(record)
    for (rank, microbatch), records in by_microbatch.items():
        ranks_in_it = planned.reductions(name, rank)[0] if kind == "partial sum" else (rank,)
        data_ranks = {data_rank(each) for each in ranks_in_it}
        results = [
            result
            for result in located.recompute.microbatch_results
            if data_rank(result.rank) in data_ranks and microbatch in (-1, result.microbatch)
        ]
        total = torch.stack([record.value for record in records]).sum(0)  # A block may be used twice
        if (shard := records[0].shard) is not None:
            yield ReductionInput(rank, records[0]._replace(value=total), shard, results)


def _wrong_inputs(located: LocatedDifference, planned: PlannedRecords, kind: RankKind) -> dict[int, ReductionInput]:
    """The first input of each rank that is not what one device has."""
    bound, wrong = located.difference.difference.bound, dict[int, ReductionInput]()
    for reduced in _reduction_inputs(located, planned, kind):
        expected = reduced.cut(_sum_gradients(reduced.results, located.key.name))
        pair = AlignedTensorPair(reduced.rank, reduced.record.value, expected, reduced.record)
        if located.reference.distance_of(located.key, pair) > bound:
            wrong.setdefault(reduced.rank, reduced)
    return wrong


def _sum_gradients(results: Sequence[MicroBatchResult], name: str) -> Tensor:
    return torch.stack([result.gradients[name] for result in results]).sum(0)


def explain_own_gradient(e: MismatchEvidence) -> str:
    """Words for a gradient that is wrong before it is added to those of other ranks."""
    located, recompute, planned = e.source, e.source.recompute, e.source.recompute.planned
    if planned is None or not planned.has_complete_local_gradients(e.name):
        return ""
    if not (wrong := _wrong_inputs(located, planned, "local gradient")):
        return ""
    reduced, alternatives = wrong[min(wrong)], dict[str, Tensor]()
    if recompute.step:
        before, places = replace(recompute, step=recompute.step - 1), {result[:2] for result in reduced.results}
        results = [result for result in before.microbatch_results if result[:2] in places]
        alternatives["what it was in the step before"] = _sum_gradients(results, e.name)
        clipped = recompute.reference_runs.step_references[before.step].value_of(TensorKey("clipped gradient", e.name))
        alternatives |= {} if clipped is None else {"the clipped gradient of the step before": clipped}
    evidence = MismatchEvidence(
        reduced.record.value,
        reduced.cut(_sum_gradients(reduced.results, e.name)),
        reduced.rank,
        e.known_factors,
        name=e.name,
        contributions=[
            MicroBatchContribution(
                planned.holder(e.name, r.rank), r.microbatch, reduced.cut(r.gradients[e.name]), r.target_count
            )
            for r in reduced.results
        ],
        alternatives={words: reduced.cut(tensor) for words, tensor in alternatives.items()},
        source_tensors={f"gradient {n}": _sum_gradients(reduced.results, n) for n in reduced.results[0].gradients},
    )
    cause = explain(evidence, TENSOR_HYPOTHESES)
    of_all = explain(e, TENSOR_HYPOTHESES) if len(wrong) == planned.plan.dims.ranks > 1 else ""
    sentence = f"the own gradient of {format_numbered('rank', sorted(wrong))} is wrong{cause and ': '}{cause}"
    return sentence + (f"; their sum: {of_all}" if of_all not in ("", cause) else "")


def wrong_sum_text(e: MismatchEvidence) -> str:
    """The begin of a sentence about the reduction that is wrong; empty if nothing was recorded of it."""
    located, planned = e.source, e.source.recompute.planned
    if planned is None or TensorKey("local gradient", e.name) not in located.records_by_key:
        return ""
    levels = planned.reductions(e.name, e.rank or 0)
    if len(levels) > 1:
        partial_sums = _wrong_inputs(located, planned, "partial sum")
        wrong = [rank for rank in levels[1] if rank in partial_sums]
        levels = planned.reductions(e.name, wrong[0]) if wrong else levels[1:]
    return f"the sum over {format_numbered('rank', levels[0])} is wrong: "
