"""The table of what may have gone wrong, in the order in which it is tried; the first that fits the numbers wins."""

from dataclasses import replace

from motet.parity.compare.align_with_reference import TensorAlignmentError
from motet.parity.compare.reference_runs import DifferenceAtStep
from motet.parity.diagnose import optimizer_hypotheses as optimizer
from motet.parity.diagnose import scalar_hypotheses as scalars
from motet.parity.diagnose.gradient_reductions import explain_own_gradient, wrong_sum_text
from motet.parity.diagnose.mismatch_evidence import LocatedDifference, MismatchEvidence, make_evidence
from motet.parity.diagnose.pipeline_hypotheses import PIPELINE_HYPOTHESES
from motet.parity.diagnose.recomputation_hypotheses import is_recomputed_differently
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.diagnose.split_hypotheses import SPLIT_HYPOTHESES, describe_region
from motet.parity.diagnose.tensor_hypotheses import LOSSES, TENSOR_HYPOTHESES, Hypothesis, explain
from motet.parity.record.record_verification_steps import TRAJECTORY
from motet.parity.record.tensor_recorder import ACTIVATION_KINDS, RecordsByRank, group_by_key


def starts_differently(e: MismatchEvidence) -> str:
    if e.source.difference.at.phase != TRAJECTORY:
        return "it is not what was stored before this step"
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


UNEXPLAINED = {
    "gradient": "no sum of what ranks and micro-batches have gives it: it was changed while it was summed, or after",
    "norm": "gradients are right, and no sum of their squares gives it: it has others in it, or was changed after",
    "random mask": "it is no mask of any of these rows and steps: drawn with another seed, "
    "or by a generator that goes on",
}


def describe_unexplained(e: MismatchEvidence) -> str:
    """Words for a tensor that no hypothesis explains."""
    if e.kind != "sample":
        return UNEXPLAINED.get(e.kind, "") or describe_region(e)
    count = differing = e.value.numel()
    if e.value.shape == e.expected.shape:
        differing = int((e.value != e.expected).sum())
    if differing < count / 2:
        return f"its rows are right, but {differing} of their {count} elements differ"
    return (
        f"it is of no row of the {len(e.source.recompute.reference_runs.step_references)} steps that were compared: "
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
        return _find_cause(recompute, records, difference)
    except Exception as error:  # noqa: BLE001  # whatever a hypothesis runs into
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
    if text := is_recomputed_differently(evidence) or explain(evidence, (*PIPELINE_HYPOTHESES, *SPLIT_HYPOTHESES)):
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
