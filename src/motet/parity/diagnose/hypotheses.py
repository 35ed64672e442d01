"""Hypotheses about the cause of a difference, and the table in which they are tried.

The table lists possible mistakes in the order in which they are tried; the first that fits the numbers wins.

Hypotheses about activations in a pipeline: tensors of another micro-batch, and tensors that cross a border.

Hypotheses about recomputation: backward recomputes a tensor, and gets other numbers than forward.

Hypotheses about tensors that ranks compute in parts, by the ModelSharding: missing sums, parts of other ranks.

Hypotheses about inputs of reductions: the local gradient of a rank is wrong, or a sum of right ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parallel.sync_groups import same_rows_groups
from motet.parity.compare.align_with_reference import (
    AlignedTensorPair,
    PlannedRecords,
    TensorAlignmentError,
    format_numbered,
)
from motet.parity.compare.reference_runs import DifferenceAtStep
from motet.parity.diagnose import mismatch_evidence as fit
from motet.parity.diagnose import optimizer_hypotheses as optimizer
from motet.parity.diagnose import optimizer_hypotheses as scalars
from motet.parity.diagnose.context_hypotheses import CONTEXT_HYPOTHESES
from motet.parity.diagnose.expert_hypotheses import EXPERT_HYPOTHESES
from motet.parity.diagnose.mismatch_evidence import (
    LocatedDifference,
    MicroBatchContribution,
    MismatchEvidence,
    make_evidence,
)
from motet.parity.diagnose.single_device_recompute import MicroBatchResult, SingleDeviceRecompute
from motet.parity.diagnose.tensor_hypotheses import LOSSES, TENSOR_HYPOTHESES, Hypothesis, explain
from motet.parity.diagnose.tolerances import tolerances
from motet.parity.record.activation_parts import module_of
from motet.parity.record.recomputed_tensors import LEFT_CHANGED
from motet.parity.record.record_verification_steps import TRAJECTORY
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    RankKind,
    RecordedShard,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    group_by_key,
    sketch_shard,
)
from motet.parity.subjects.job_subject import GENERATED, SHORT_LOSS


def is_of_another_microbatch(e: MismatchEvidence) -> str:
    """An activation or a gradient that the same rank should have in another micro-batch."""
    record, planned = e.source.worst_pair.record, e.source.recompute.planned
    if record is None or planned is None or not planned.plan.model_sharding.stages:
        return ""
    for pair in e.source.pairs:
        other = pair.record
        if other is None or pair.rank != e.rank or other.microbatch == record.microbatch or not e.value.any():
            continue
        if pair.expected.shape == e.value.shape and fit.is_equal_up_to_rounding(e.value, pair.expected):
            rows = f"{format_numbered('row', other.rows)} of the batch"
            return f"micro-batch {record.microbatch} has that of micro-batch {other.microbatch}, {rows}"
    return ""


PIPELINE_HYPOTHESES: tuple[Hypothesis, ...] = ((ACTIVATION_KINDS, is_of_another_microbatch),)


_CAUSES_FIRST = ("buffer ", "random mask ", "activation ")  # The first may have caused the others
AFTER_BACKWARD = ("activation gradient", "gradient", "norm", "clipped gradient", "state", "parameter", "buffer")


def is_recomputed_differently(e: MismatchEvidence) -> str:
    """Words for a tensor that a rank recomputed with other bits than in forward."""
    if e.kind not in AFTER_BACKWARD:
        return ""
    recorded = ((rank, r) for rank, records in enumerate(e.source.records_by_rank) for r in records)
    different = [(rank, record) for rank, record in recorded if record.kind == "recomputed"]
    if not different:
        return ""
    is_of_buffers = e.kind == "buffer"  # Recomputation has changed them, whatever it has computed from them
    rank, record = min(  # The earliest of equals
        different,
        key=lambda each: (
            is_of_buffers and not each[1].name.endswith(LEFT_CHANGED),
            each[0] != e.rank,
            _order(each[1]),
        ),
    )
    place = f"micro-batch {record.microbatch} of rank {rank}" if record.microbatch >= 0 else f"rank {rank}"
    return f"{_words(record.name)} (first on {place})"


def _order(record: RecordedTensor) -> int:
    return next(index for index, prefix in enumerate(_CAUSES_FIRST) if record.name.startswith(prefix))


def _words(name: str) -> str:
    if name.endswith(LEFT_CHANGED):
        return f"{name}, which computes the forward again: it repeats the counting of the forward"
    if name.startswith("buffer "):
        return f"backward computes the forward again with another buffer: {name}"
    return f"backward computes the forward again and gets another {name}"


def is_a_summand(e: MismatchEvidence) -> str:
    """Ranks that compute the same rows have different values where they should have one sum of them."""
    if e.located is None:
        return ""
    located, worst, groups = e.located, e.located.worst_pair, same_rows_groups(e.located.recompute.layout.dims)
    ranks = next((ranks for ranks in groups if worst.rank in ranks), ())
    pairs = [pair for pair in located.pairs if pair.rank in ranks and _is_alike(pair.record, worst.record)]
    if len(pairs) < 2 or any(not torch.equal(pair.expected, worst.expected) for pair in pairs):
        return ""
    if all(fit.is_equal_up_to_rounding(pair.value, worst.value) for pair in pairs):  # Scaled, and no summands
        return ""
    values = torch.stack([pair.value.double() for pair in pairs])
    scale = tolerances().fit * float(worst.expected.double().abs().max())
    is_wrong = ((values - worst.expected).abs() > scale).any(0)  # A part of it may be a sum, and another part complete
    if not fit.is_equal_up_to_rounding(values.sum(0)[is_wrong], worst.expected[is_wrong]):
        return ""
    numbers, count = format_numbered("rank", sorted(pair.rank or 0 for pair in pairs)), int(is_wrong.sum())
    part = "it" if 2 * count > is_wrong.numel() else f"{count} of its {is_wrong.numel()} elements"
    return f"each rank has a summand of {part}: the sum over {numbers} is missing"


def _is_alike(record: RecordedTensor | None, other: RecordedTensor | None) -> bool:
    """Whether two ranks should have the same elements."""
    fields = [each and (each.shard, each.part, each.microbatch, each.rows) for each in (record, other)]
    return fields[0] == fields[1]


def is_the_part_of_another_rank(e: MismatchEvidence) -> str:
    for pair in e.source.pairs:
        is_candidate = pair.rank != e.rank and pair.record is not None and pair.expected.shape == e.value.shape
        if is_candidate and fit.is_equal_up_to_rounding(e.value, fit.as_numbers(pair.expected)):
            same = fit.is_equal_up_to_rounding(fit.as_numbers(pair.expected), e.expected)
            return "" if same else f"it is the part of rank {pair.rank}"
    return ""


def has_a_bias_several_times(e: MismatchEvidence) -> str:
    """Each rank adds the bias to its summand of an output, say."""
    name = f"{module_of(e.name)}.bias"
    bias = e.source.reference.value_of(TensorKey("starting parameter", name))
    if bias is None or e.value.shape != e.expected.shape or not len(bias) or e.value.numel() % len(bias):
        return ""
    error = (e.value - e.expected).reshape(-1, len(bias))
    factors = fit.solve_coefficients(error, [bias.expand_as(error)])
    times = fit.format_factor(1 + factors[0]) if factors and factors[0] else ""
    return times and f"{name} is in it {times} times"


def describe_region(e: MismatchEvidence) -> str:
    """The split tensors, attributes and communication of a module whose output nothing else explains."""
    planned = e.source.recompute.planned
    if planned is None or e.kind not in ACTIVATION_KINDS:
        return ""
    sharding, module = planned.plan.model_sharding, module_of(e.name)
    region = planned.activations.region_of(module)
    comms = [f"{comm.operation} it over {comm.over}" for comm in sharding.boundary_comms if comm.module == module]
    if region is None:
        return f"all tensors before it are right: here ranks {' and '.join(comms)}" if comms else ""
    names = [f"{name}." for name in ([region.module] if region.module else [*region.opened_by, region.closed_by])]
    split = [name for name, rule in sharding.rules.items() if rule.splits and name.startswith(tuple(names))]
    attributes = [f"{m}.{a} = {v}" for m, a, v in sharding.attributes if f"{m}.".startswith(tuple(names))]
    around = region.module or "the model"
    return f"all tensors before it are right: in {around} ranks split {', '.join(split + attributes)}"


def differs_for_some_tokens(e: MismatchEvidence) -> str:
    """The vectors of some entries of a vocabulary are wrong, at the ends of the parts of ranks, say."""
    planned, record = e.source.recompute.planned, e.source.worst_pair.record
    tokens = e.source.reference.value_of(TensorKey("sample", "tokens"))
    table = None if planned is None else planned.split_table(module_of(e.name))
    if table is None or tokens is None or record is None or not record.rows or record.is_sketched:
        return ""
    ids = tokens[[e.source.tensor.rows.index(row) for row in record.rows]].flatten()
    if e.value.numel() % len(ids) or e.value.shape != e.expected.shape or record.part is not None:
        return ""
    vectors = zip(ids.tolist(), *(each.reshape(len(ids), -1) for each in (e.value, e.expected)), strict=True)
    is_right = [(token, fit.is_equal_up_to_rounding(value, expected)) for token, value, expected in vectors]
    wrong, right = ({token for token, right in is_right if right == each} for each in (False, True))
    if not wrong or wrong & right or len(wrong) > MAX_NAMED_IDS:
        return ""
    ends = {
        "first": {s.start: rank for rank, s in table.items()},
        "last": {s.stop - 1: rank for rank, s in table.items()},
    }
    for which, by_id in ends.items():
        if wrong <= set(by_id):
            entries = "entry" if len(wrong) == 1 else "entries"
            ranks = format_numbered("rank", sorted(by_id[each] for each in wrong))
            return f"it differs for {format_numbered('token', sorted(wrong))}, the {which} {entries} of {ranks}"
    return f"it differs for {format_numbered('token', sorted(wrong))} alone"


SPLIT_HYPOTHESES: tuple[Hypothesis, ...] = (
    (("activation",), differs_for_some_tokens),
    ((*ACTIVATION_KINDS, "gradient"), is_a_summand),
    (ACTIVATION_KINDS, is_the_part_of_another_rank),
    (("activation",), has_a_bias_several_times),
)


class ReductionInput(NamedTuple):
    """The gradient of one parameter that a rank gave to a reduction, of one micro-batch or of all."""

    rank: int
    record: RecordedTensor
    shard: RecordedShard
    results: Sequence[MicroBatchResult]  # Results of one device for its micro-batches

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
    """The first input of each rank that differs from that of one device."""
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
        alternatives["its value in the step before"] = _sum_gradients(results, e.name)
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
    cause = explain(evidence, TENSOR_HYPOTHESES) or _explain_stacked(evidence, reduced)
    sum_cause = explain(e, TENSOR_HYPOTHESES) if len(wrong) == planned.plan.dims.ranks > 1 else ""
    sentence = f"the local gradient of {format_numbered('rank', sorted(wrong))} is wrong{cause and ': '}{cause}"
    return sentence + (f"; their sum: {sum_cause}" if sum_cause not in ("", cause) else "")


def _explain_stacked(e: MismatchEvidence, reduced: ReductionInput) -> str:
    """Words for a gradient of stacked weights, of which some are wrong: those of some experts, say."""
    shape, contributions = reduced.shard.spec.local_shape, e.contributions
    if len(shape) < 3 or reduced.shard.numel != prod(shape) or reduced.record.is_sketched:
        return ""
    value, expected, *shares = (x.view(shape[0], -1) for x in (e.value, e.expected, *(c.value for c in contributions)))
    wrong = [n for n in range(shape[0]) if not fit.is_equal_up_to_rounding(value[n], expected[n])]
    for n in wrong if len(wrong) < shape[0] else ():
        parts = [c._replace(value=share[n]) for c, share in zip(contributions, shares, strict=True)]
        stacked = replace(e, value=value[n], expected=expected[n], contributions=parts, alternatives={})
        if text := explain(stacked, TENSOR_HYPOTHESES):
            return f"of its {shape[0]} weights, {format_numbered('number', wrong)} alone differ; in number {n} {text}"
    return ""


def wrong_sum_text(e: MismatchEvidence) -> str:
    """The beginning of a sentence about the wrong reduction; empty if it has no record."""
    located, planned = e.source, e.source.recompute.planned
    if planned is None or TensorKey("local gradient", e.name) not in located.records_by_key:
        return ""
    levels = planned.reductions(e.name, e.rank or 0)
    if len(levels) > 1:
        partial_sums = _wrong_inputs(located, planned, "partial sum")
        wrong = [rank for rank in levels[1] if rank in partial_sums]
        levels = planned.reductions(e.name, wrong[0]) if wrong else levels[1:]
    return f"the sum over {format_numbered('rank', levels[0])} is wrong: "


def starts_differently(e: MismatchEvidence) -> str:
    if e.source.difference.at.phase != TRAJECTORY:
        return "it differs from the value stored before this step"
    return "" if e.source.recompute.step else "its initial values differ from those of one device"


def depends_on_microbatching(e: MismatchEvidence) -> str:
    placement = e.source.reference.row_placements.get(e.source.key)
    if placement is None or not placement.is_by_shape:
        return ""
    return (
        "its rows depend on the other rows of their micro-batch, or on how many there are (statistics over the batch, "
        "say, or numbers that are drawn for all rows together): on one device, too, they change with micro-batches"
    )


def buffer_differs(e: MismatchEvidence) -> str:
    buffers = [d for d in e.source.all_differences if d.key.kind == "buffer" and d.rank == e.rank and not d.is_rounding]
    return f"on this rank buffer {buffers[0].key.name} differs after the step, too" if buffers else ""


SHORT_FORWARDS = {SHORT_LOSS: "a forward without gradients", GENERATED: "the generation of tokens"}
MAX_NAMED_IDS = 8
UNEXPLAINED = {
    "gradient": "no sum of contributions of ranks and micro-batches gives it: it was changed during the sum, or after",
    "norm": "gradients are right, and no sum of their squares gives it: it includes others, or was changed after",
    "random mask": "it is not a mask of any of these rows and steps: drawn with another seed, "
    "or by a generator that goes on",
}


def describe_unexplained(e: MismatchEvidence) -> str:
    """Words for a tensor that no hypothesis explains."""
    if tolerances().is_coarse:  # How unlikely the difference is says more
        return ""
    if e.kind == "evaluation" and e.name in SHORT_FORWARDS:
        return f"training is right: it is {SHORT_FORWARDS[e.name]}, of a length that ranks do not divide"
    if e.kind == "norm" and not any(key.kind == "gradient" for key in e.source.records_by_key):
        return ""
    if e.kind != "sample":
        return UNEXPLAINED.get(e.kind, "") or describe_region(e)
    count = differing = e.value.numel()
    if e.value.shape == e.expected.shape:
        differing = int((e.value != e.expected).sum())
    if "[" in e.name:  # An argument of a block
        return f"the batch is right, and {differing} of {count} elements of this block's part of it differ"
    if differing < count / 2:
        return f"its rows are right, but {differing} of their {count} elements differ"
    return (
        f"it matches no row of the {len(e.source.recompute.reference_runs.step_references)} compared steps: "
        "rows are read in another order (another seed, say), or from another place"
    )


HYPOTHESES: tuple[Hypothesis, ...] = (
    (("evaluation",), scalars.runs_in_training_mode),
    (LOSSES, scalars.is_another_count_or_loss),
    (LOSSES, scalars.has_other_losses),
    (("norm",), scalars.squares_are_multiplied),
    (("norm",), scalars.is_another_norm),
    ((*LOSSES, "norm"), scalars.is_multiplied),
    (LOSSES, scalars.has_few_bits),
    (LOSSES, scalars.has_other_targets),
    (("loss",), scalars.microbatch_loss_differs),
    (("state",), optimizer.counts_other_steps),
    (("state",), optimizer.update_differs),
    *TENSOR_HYPOTHESES,
    (("starting parameter",), starts_differently),
    (ACTIVATION_KINDS, depends_on_microbatching),
    (ACTIVATION_KINDS, buffer_differs),
)


def find_likely_cause(recompute: SingleDeviceRecompute, records: RecordsByRank, difference: DifferenceAtStep) -> str:
    """A likely cause in words; empty if there is none. The location of a difference is right without one."""
    try:
        cause, key = _find_cause(recompute, records, difference), difference.difference.key
        return "; ".join(filter(None, (cause, _advice(recompute, records, key))))
    except Exception as error:  # noqa: BLE001  # a hypothesis may raise anything
        return f"looking for its cause failed: {type(error).__name__}: {error}"


def _find_cause(recompute: SingleDeviceRecompute, records_by_rank: RecordsByRank, difference: DifferenceAtStep) -> str:
    key, records_by_key = difference.difference.key, group_by_key(records_by_rank)
    reference = recompute.reference_runs.reference_for(difference.at)
    tensor, records = reference.tensors.get(key), records_by_key.get(key, [])
    if tensor is None or not records or difference.difference.reason:
        return difference.difference.reason
    try:
        pairs = reference.align(tensor, records, recompute.planned)
    except TensorAlignmentError as error:
        return str(error)
    located = LocatedDifference(recompute, records_by_rank, difference, reference, tensor, pairs)
    evidence = make_evidence(located)
    part_hypotheses = (*EXPERT_HYPOTHESES, *PIPELINE_HYPOTHESES, *SPLIT_HYPOTHESES, *CONTEXT_HYPOTHESES)
    if text := is_recomputed_differently(evidence) or explain(evidence, part_hypotheses):
        return text
    if key.kind == "gradient" and (text := explain_own_gradient(evidence)):
        return text
    prefix = wrong_sum_text(evidence) if key.kind == "gradient" else ""
    if text := explain(evidence, HYPOTHESES):
        return prefix + text + located.location_text()
    sketched = {key for key, some in records_by_key.items() if any(record.is_sketched for _, record in some)}
    if key in sketched:  # A sketch does not show elements; a smaller tensor may
        same_kind = [d for d in located.all_differences if d.key.kind == key.kind and not d.is_rounding]
        for other in [d for d in same_kind if d.key not in sketched][:1]:
            if text := _find_cause(recompute, records_by_rank, replace(difference, difference=other)):
                return f"as {other.key.name}: {text}"
    text = describe_unexplained(evidence)
    return text and prefix + text + located.location_text()


def _advice(recompute: SingleDeviceRecompute, records: RecordsByRank, key: TensorKey) -> str:
    """Words for the tensors that parallel code of the caller should return, if it returns no gradients."""
    has_gradients = any(record.kind == "gradient" for rank_records in records for record in rank_records)
    if not recompute.reference_runs.has_mean_gradients or has_gradients or key.kind not in ("parameter", "norm"):
        return ""
    return (
        "return gradient.NAME for each parameter too: gradients show whether backward, their sum or the update is wrong"
    )
