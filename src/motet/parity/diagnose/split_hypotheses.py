"""Hypotheses about tensors that ranks compute in parts, by the ModelSharding: missing sums, parts of other ranks."""

import torch

from motet.parallel.sync_groups import same_rows_groups
from motet.parity.compare.planned_records import format_numbered
from motet.parity.diagnose import linear_fit as fit
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.diagnose.tensor_hypotheses import Hypothesis
from motet.parity.record.activation_parts import module_of
from motet.parity.record.tensor_recorder import ACTIVATION_KINDS, RecordedTensor, TensorKey


def is_a_summand(e: MismatchEvidence) -> str:
    """Ranks that compute the same rows have different values of what should be one sum of them."""
    if e.located is None:
        return ""
    located, worst, groups = e.located, e.located.worst_pair, same_rows_groups(e.located.recompute.layout.dims)
    ranks = next((ranks for ranks in groups if worst.rank in ranks), ())
    pairs = [pair for pair in located.pairs if pair.rank in ranks and _is_alike(pair.record, worst.record)]
    if len(pairs) < 2 or any(not torch.equal(pair.expected, worst.expected) for pair in pairs):
        return ""
    if all(fit.is_equal_up_to_rounding(pair.value, worst.value) for pair in pairs):  # Scaled, and no summands
        return ""
    total = torch.stack([pair.value.double() for pair in pairs]).sum(0)
    if not fit.is_equal_up_to_rounding(total, worst.expected):
        return ""
    numbers = format_numbered("rank", sorted(pair.rank or 0 for pair in pairs))
    return f"each rank has a summand of it: the sum over {numbers} is missing"


def _is_alike(record: RecordedTensor | None, other: RecordedTensor | None) -> bool:
    """Whether two ranks should have the same elements."""
    fields = [each and (each.shard, each.part, each.microbatch, each.rows) for each in (record, other)]
    return fields[0] == fields[1]


def is_the_part_of_another_rank(e: MismatchEvidence) -> str:
    for pair in e.source.pairs:
        is_candidate = pair.rank != e.rank and pair.record is not None and pair.expected.shape == e.value.shape
        if is_candidate and fit.is_equal_up_to_rounding(e.value, fit.as_numbers(pair.expected)):
            same = fit.is_equal_up_to_rounding(fit.as_numbers(pair.expected), e.expected)
            return "" if same else f"it is what rank {pair.rank} should have"
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
    return f"all tensors before it are right: of {around} ranks split {', '.join(split + attributes)}"


SPLIT_HYPOTHESES: tuple[Hypothesis, ...] = (
    ((*ACTIVATION_KINDS, "gradient"), is_a_summand),
    (ACTIVATION_KINDS, is_the_part_of_another_rank),
    (("activation",), has_a_bias_several_times),
)
