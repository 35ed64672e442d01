"""The steps of one device, how far rounding may move them, and the first tensor in which recorded steps differ.

The dimension of each activation that has the rows: found on one device, which divides the batch in two ways.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from motet.core.errors import InputError, check_input
from motet.parallel.model_sharding import ModelInventory
from motet.parity.compare.align_with_reference import (
    UNKNOWN_ROWS,
    PlannedRecords,
    ReferenceTensor,
    RowPlacement,
    TensorAlignmentError,
    align_tensor,
)
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    TensorDifference,
    build_reference_tensors,
    compare_with_reference,
    error_bound,
)
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.engine_hooks import record_step
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    ROW_KINDS,
    RankRecords,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    TensorRecorder,
    group_by_key,
)

RESULT_KINDS = ("gradient", "sum", "norm")


def find_row_placements(
    reference: ReferenceStep, microbatches: Sequence[RecordedTensor]
) -> dict[TensorKey, RowPlacement]:
    """The placement of the rows in each tensor of a step, by the same step of one device with several micro-batches.

    If results change, too, rows depend on each other, and no layout computes the same as one device. Then a shape alone
    places the rows, so that the first activation that differs can be named. Noise may be as large as a small gradient,
    and places none whose output has no placement.
    """
    records_by_key, differences = group_by_key([microbatches]), compare_with_reference(reference, [microbatches])
    without_noise = replace(reference, noise={})
    changes_results = any(d.key.kind in RESULT_KINDS and not d.is_rounding for d in differences)
    placements = dict[TensorKey, RowPlacement]()
    for key, tensor in reference.tensors.items():
        if key.kind in ROW_KINDS:
            records = records_by_key.get(key, [])
            possible = list(_possible_placements(tensor, records))
            is_output_placed = placements.get(TensorKey("activation", key.name)) != UNKNOWN_ROWS
            step = reference if is_output_placed or key.kind != "activation gradient" else without_noise
            fitting = (placement for placement in possible if _fits(step, tensor, records, placement=placement))
            has_one_form = changes_results and [each.how for each in possible] == ["rows"]
            by_shape = possible[0]._replace(is_by_shape=True) if has_one_form else UNKNOWN_ROWS
            placements[key] = next(fitting, by_shape)
    return placements


def _possible_placements(tensor: ReferenceTensor, records: RankRecords) -> Iterator[RowPlacement]:
    """All placements that agree with the shapes."""
    forms = {(tuple(record.value.shape), len(record.rows), record.is_sketched) for _, record in records}
    if len(forms) != 1:
        return
    ((shape, microbatch_rows, is_sketched),) = forms
    unsplit, rows = tuple(tensor.value.shape), len(tensor.rows)
    if shape == unsplit:
        yield from (RowPlacement("same"), RowPlacement("sum"))
    for dim, size in enumerate(unsplit[: 1 if is_sketched else len(shape)]):
        others_match = shape[:dim] + shape[dim + 1 :] == unsplit[:dim] + unsplit[dim + 1 :]
        if size and others_match and size % rows == 0 and shape[dim] * rows == size * microbatch_rows:
            yield from (
                RowPlacement("rows", dim, is_inner) for is_inner in ((False,) if size == rows else (False, True))
            )


def _fits(reference: ReferenceStep, tensor: ReferenceTensor, records: RankRecords, *, placement: RowPlacement) -> bool:
    try:
        pairs = align_tensor(tensor, records, placement=placement)
    except TensorAlignmentError:
        return False
    bound = min(error_bound(reference, tensor), MAX_NOISE_BOUND)  # Within more, every placement would fit
    return all(reference.distance_of(tensor.key, pair) <= bound for pair in pairs)


PERTURBED_RUNS = 2  # References whose parameters start one ulp away
MAX_NOISE_BOUND = 1e-3  # Where rounding alone is larger, a mistake may be smaller


@dataclass(frozen=True)
class ReferenceRuns:
    """The steps of one device."""

    step_references: Sequence[ReferenceStep]
    trajectory_references: Sequence[ReferenceStep]  # The same steps, with the noise of all steps before
    folder: Path  # Folder with the state before each step as a checkpoint
    inventory: ModelInventory
    # The first tensor of the last step that one device computes differently from its own checkpoint.
    self_difference: TensorDifference | None = None
    has_mean_gradients: bool = False  # Gradients are divided by the count of targets

    def reference_for(self, at: recording.RecordedStepKey) -> ReferenceStep:
        if at.phase == recording.FROM_REFERENCE:
            return self.step_references[at.step]
        reference = self.trajectory_references[at.step]
        compared = {k: t for k, t in reference.tensors.items() if k.kind != "starting parameter"}
        return replace(reference, tensors=compared) if at.phase == recording.UNOBSERVED else reference


def run_reference(subject: recording.VerificationSubject, folder: Path) -> ReferenceRuns:
    """Train on this process alone, then again from parameters that are one ulp away."""
    with subject.numerics(), recording.single_thread():
        on_rank = subject.with_microbatches(1).build(recording.SINGLE_RANK_GROUP, folder)
        step_references = []
        for step in range(subject.steps):
            on_rank.state.save(step)
            step_references.append(_record_reference(on_rank, step))
        on_rank.state.save(subject.steps)
        last_step, last = subject.steps - 1, step_references[-1]
        trajectory = [replace(reference, noise={}) for reference in step_references]
        evaluation = (record._replace(flops_so_far=last.total_flops) for record in recording.record_evaluation(on_rank))
        trajectory[-1] = replace(trajectory[-1], tensors={**last.tensors, **build_reference_tensors(evaluation)})
        runs = ReferenceRuns(step_references, trajectory, folder, on_rank.engine.plan.inventory)
        differences = compare_with_reference(last, [recording.record_restored_step(on_rank, folder, last_step)])
        if difference := next((each for each in differences if not each.is_rounding), None):
            return replace(runs, self_difference=difference)
        for seed in range(PERTURBED_RUNS):
            for step, reference in enumerate(step_references):
                _restore_perturbed(on_rank, folder, step=step, seed=seed)
                _add_noise(reference, recording.run_recorded_step(on_rank, step))
            _restore_perturbed(on_rank, folder, step=0, seed=seed)
            for step, reference in enumerate(trajectory):
                _add_noise(reference, recording.run_recorded_step(on_rank, step, evaluates=step == last_step))
        placements = _find_placements(subject, folder, step_references[0])
        for reference in [*step_references, *trajectory]:
            reference.row_placements.update(placements)
        return runs


def _record_reference(subject: recording.VerificationSubjectOnRank, step: int) -> ReferenceStep:
    recorder, counter = TensorRecorder(sketches_shards=False), FlopCounterMode(display=False)
    with counter:
        recorder.flops_so_far = counter.get_total_flops
        record_step(subject.engine, recorder, lambda: subject.step(step, recorder))
    return ReferenceStep(build_reference_tensors(recorder.records), subject.learning_rate(step))


def _restore_perturbed(subject: recording.VerificationSubjectOnRank, folder: Path, *, step: int, seed: int) -> None:
    subject.state.restore(recording.step_checkpoint_path(folder, step))
    generator, optimizer = torch.Generator().manual_seed(seed), subject.engine.optimizer
    for master in optimizer.sharded_parameters.local_masters:
        up = torch.rand(master.shape, generator=generator) < 0.5
        moved = torch.nextafter(master, torch.where(up, torch.inf, -torch.inf).to(master.dtype))
        master.copy_(moved.masked_fill_(master == 0, 0))  # The float next to 0 rounds nothing, but decides ties
    optimizer.sync_parameters()


def _add_noise(reference: ReferenceStep, records: list[RecordedTensor]) -> None:
    for difference in compare_with_reference(reference, [records]):
        # A tensor with another shape, routed differently, has no bound
        relative_error = torch.inf if difference.reason else difference.relative_error
        reference.noise[difference.key] = max(relative_error, reference.noise.get(difference.key, 0.0))


def _find_placements(
    subject: recording.VerificationSubject, folder: Path, reference: ReferenceStep
) -> dict[TensorKey, RowPlacement]:
    """Repeat a step with few rows in each micro-batch: two if possible, since models may treat one differently."""
    counts = (count for count in range(subject.batch_rows, 1, -1) if subject.batch_rows % count == 0)
    for microbatches in sorted(counts, key=lambda count: count == subject.batch_rows):
        on_rank = subject.with_microbatches(microbatches).build(recording.SINGLE_RANK_GROUP, folder)
        on_rank.state.restore(recording.step_checkpoint_path(folder, 0))
        try:
            records = recording.run_recorded_step(on_rank, 0)
        except Exception:  # noqa: BLE001  # models refuse a single row in many ways
            continue
        return find_row_placements(reference, records)
    return {}


def make_external_reference(reference_runs: ReferenceRuns, steps: Sequence[RecordsByRank]) -> ReferenceRuns:
    """The reference of only those tensors that external code returns; its gradients are those of the mean loss."""
    key_sets = [{record.key for record in records} for ranks in steps for records in ranks]
    keys = {key for some in key_sets for key in some}
    available = reference_runs.trajectory_references[0].tensors
    check_input(keys, "verify: your step returns nothing; return full tensors by name, such as gradient.NAME")
    for key in sorted(key for some in key_sets for key in keys - some):
        raise InputError(f"verify: {key.kind} {key.name} is only in some steps or on some ranks; return it in all")
    for key in sorted(keys - set(available)):
        names = ", ".join(other.name for other in available if other.kind == key.kind) or "none"
        raise InputError(f"verify: one device has no {key.kind} {key.name}; there are {names}")
    references = [_with_mean_gradients(reference, keys) for reference in reference_runs.trajectory_references]
    return replace(reference_runs, trajectory_references=references, has_mean_gradients=True)


def _with_mean_gradients(reference: ReferenceStep, keys: set[TensorKey]) -> ReferenceStep:
    count, tensors = reference.scalar("sum", "target tokens") or torch.nan, reference.tensors.items()
    divided = {k: replace(t, value=t.value / count) if k.kind == "gradient" else t for k, t in tensors if k in keys}
    return replace(reference, tensors=divided)


@dataclass(frozen=True)
class DifferenceAtStep:
    """The difference of a tensor, and the step in which it was computed."""

    at: recording.RecordedStepKey
    difference: TensorDifference

    def __str__(self) -> str:
        phase_text = "" if self.at.phase == recording.FROM_REFERENCE else f", steps {self.at.phase}"
        return f"{self.difference.key}, step {self.at.step + 1}{phase_text}"


@dataclass(frozen=True)
class Comparison:
    """All recorded steps against the reference, up to the first tensor that differs."""

    worst: DifferenceAtStep
    first: DifferenceAtStep | None
    noise_dominated: tuple[str, ...]  # Tensors that rounding alone changes too much
    unplaced: tuple[str, ...] = ()  # Tensors whose rows and shards neither one device nor the plan shows
    activations: int = 0  # Count on one device, gradients of activations included


def compare_recorded_steps(
    reference_runs: ReferenceRuns,
    recorded: Mapping[recording.RecordedStepKey, RecordsByRank],
    planned: PlannedRecords | None = None,
) -> Comparison:
    """Compare step by step; skip the steps after one that differs."""
    differences: list[DifferenceAtStep] = []
    for at in recorded:
        step_differences = compare_with_reference(reference_runs.reference_for(at), recorded[at], planned)
        differences += [DifferenceAtStep(at, difference) for difference in step_differences]
        if not all(difference.is_rounding for difference in step_differences):
            break
    worst = max(differences, key=lambda each: each.difference.relative_error)
    first = next((each for each in differences if not each.difference.is_rounding), None)
    noisy = [] if first else [str(each) for each in differences if each.difference.bound > MAX_NOISE_BOUND]
    reference = reference_runs.step_references[0]
    keys = [key for key in reference.tensors if key.kind in ROW_KINDS] if planned and not first else []
    activations = [k for k in keys if k.kind in ACTIVATION_KINDS]
    unknown = {k for k in activations if planned and planned.activations.splits(k.name) is None}
    unplaced = (k for k in keys if reference.is_without_rows(k) or k in unknown)
    return Comparison(worst, first, tuple(noisy), tuple(map(str, unplaced)), len(activations))
