"""Hypotheses about tensors that ranks compute in parts, by the ModelSharding: missing sums, parts of other ranks."""

import torch

from motet.parity.compare.align_with_reference import format_numbered
from motet.parity.diagnose import linear_fit as fit
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.diagnose.tensor_hypotheses import Hypothesis
from motet.parity.record.activation_parts import module_of
from motet.parity.record.tensor_recorder import ACTIVATION_KINDS, RecordedTensor, TensorKey


def _records_of_same_rows(e: MismatchEvidence) -> list[tuple[int, RecordedTensor]]:
    """The tensor on all ranks that compute parts of the rows that differ most."""
    records, worst = e.source.records_by_key[e.source.key], e.source.worst_pair.record
    return [(rank, record) for rank, record in records if worst is None or record.rows == worst.rows]


def is_a_summand(e: MismatchEvidence) -> str:
    """Ranks have different values of what should be one sum of them."""
    records = _records_of_same_rows(e)
    if len(records) < 2 or any(r.part or r.value.numel() != e.value.numel() for _, r in records):
        return ""
    total = torch.stack([record.value for _, record in records]).sum(0).reshape(e.expected.shape)
    if not fit.is_equal_up_to_rounding(total, e.expected):
        return ""
    return f"each rank has a summand of it: the sum over {format_numbered('rank', [r for r, _ in records])} is missing"


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
    if region is None:
        return ""
    inside = f"{region}." if region else ""
    split = [name for name, rule in sharding.rules.items() if rule.splits and name.startswith(inside)]
    attributes = [f"{m}.{a} = {v}" for m, a, v in sharding.attributes if f"{m}.".startswith(inside)]
    return f"all tensors before it are right: of {region or 'the model'} ranks split {', '.join(split + attributes)}"


SPLIT_HYPOTHESES: tuple[Hypothesis, ...] = (
    (ACTIVATION_KINDS, is_a_summand),
    (ACTIVATION_KINDS, is_the_part_of_another_rank),
    (("activation",), has_a_bias_several_times),
)
