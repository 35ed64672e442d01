"""Hypotheses about activations in a pipeline: what belongs to another micro-batch, and what crosses a border."""

from motet.parity.compare.planned_records import format_numbered
from motet.parity.diagnose import linear_fit as fit
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.diagnose.tensor_hypotheses import Hypothesis
from motet.parity.record.tensor_recorder import ACTIVATION_KINDS


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
