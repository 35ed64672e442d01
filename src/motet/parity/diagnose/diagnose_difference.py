"""From the first tensor that differs to a likely cause."""

from dataclasses import replace

from motet.parity.compare.align_with_reference import TensorAlignmentError, align_tensor
from motet.parity.compare.first_difference import DifferenceAtStep
from motet.parity.diagnose.collect_evidence import collect_evidence
from motet.parity.diagnose.hypotheses import HYPOTHESES, describe_unexplained
from motet.parity.diagnose.located_difference import LocatedDifference
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.diagnose.tensor_hypotheses import explain
from motet.parity.record.tensor_recorder import RecordsByRank, group_by_key


def find_likely_cause(
    recompute: SingleDeviceRecompute, records_by_rank: RecordsByRank, difference: DifferenceAtStep
) -> str:
    """A likely cause in words; empty if there is none. The location of a difference is right without one."""
    try:
        return _find_cause(recompute, records_by_rank, difference)
    except Exception as error:  # noqa: BLE001  # whatever a hypothesis runs into
        return f"looking for its cause failed: {type(error).__name__}: {error}"


def _find_cause(recompute: SingleDeviceRecompute, records_by_rank: RecordsByRank, difference: DifferenceAtStep) -> str:
    key, records_by_key = difference.difference.key, group_by_key(records_by_rank)
    reference = recompute.reference_runs.reference_for(difference.at)
    tensor, records = reference.tensors.get(key), records_by_key.get(key, [])
    if tensor is None or not records or difference.difference.reason:
        return difference.difference.reason
    try:
        pairs = align_tensor(tensor, records)
    except TensorAlignmentError as error:
        return str(error)
    located = LocatedDifference(recompute, records_by_rank, difference, reference, tensor, pairs)
    evidence = collect_evidence(located)
    if text := explain(evidence, HYPOTHESES):
        return text + located.location_text()
    if any(record.is_sketched for _, record in records):  # A sketch does not show elements; a smaller tensor may
        for other in located.all_differences:
            others = records_by_key.get(other.key, [])
            is_sketched = any(record.is_sketched for _, record in others)
            if other.key.kind == key.kind and not other.is_rounding and not is_sketched:
                if text := _find_cause(recompute, records_by_rank, replace(difference, difference=other)):
                    return f"as {other.key.name}: {text}"
                break
    text = describe_unexplained(evidence)
    return text and text + located.location_text()
