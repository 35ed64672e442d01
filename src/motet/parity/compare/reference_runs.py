"""A few steps, recorded: on one device, which is the reference, and on the ranks of a layout."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from motet.collectives.compression.byte_messages import codec_numerics
from motet.parallel.process.process_group import RankGroup
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    TensorDifference,
    build_reference_tensors,
    compare_with_reference,
    find_microbatch_dependent,
)
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder, record_step
from motet.parity.subjects.job_subject import VerificationSubject, VerificationSubjectOnRank

SINGLE_RANK_GROUP = RankGroup(0, 1, None, torch.device("cpu"))
PERTURBED_RUNS = 2  # References that begin with parameters a rounding away
FROM_REFERENCE, TRAJECTORY, RESUMED = "from the state of one device", "in a row", "from its own checkpoint"
# How the steps of a layout begin: each from the state of the reference; one after another; the last once more, from the
# checkpoint that the layout itself wrote before it; and after others of which some may be underway still.
UNOBSERVED = "in a row without a look between them"


@dataclass(frozen=True)
class ReferenceRuns:
    """What the steps of a layout are held against."""

    step_references: Sequence[ReferenceStep]
    trajectory_references: Sequence[ReferenceStep]  # The same with the noise of all steps until then
    folder: Path  # Of the states before each step, as checkpoints
    # A step that one device itself does not do again from its own checkpoint, and what is the first to differ.
    self_difference: tuple[int, TensorDifference] | None = None

    def reference_for(self, phase: str, step: int) -> ReferenceStep:
        reference = (self.step_references if phase == FROM_REFERENCE else self.trajectory_references)[step]
        if phase != UNOBSERVED:
            return reference
        tensors = {site: whole for site, whole in reference.tensors.items() if site[0] != "starting parameter"}
        return replace(reference, tensors=tensors)


def phases_and_steps(steps: int) -> list[tuple[str, int]]:
    """In the order in which a layout does them; not all do the last."""
    last_step = steps - 1
    return [(phase, step) for phase in (FROM_REFERENCE, TRAJECTORY) for step in range(steps)] + [
        (RESUMED, last_step),
        (UNOBSERVED, last_step),
    ]


def run_reference(subject: VerificationSubject, folder: Path) -> ReferenceRuns:
    """Do the steps on this process alone, each recorded, and again from parameters that are a rounding away."""
    with subject.numerics(), single_thread():
        rank_subject = subject.with_microbatches(1).build(SINGLE_RANK_GROUP, folder)
        step_references = []
        for step in range(subject.steps):
            rank_subject.state.save(step)
            step_references.append(_record_reference(rank_subject, step))
        rank_subject.state.save(subject.steps)
        trajectory_references = [
            replace(reference, noise={}, microbatch_dependent=set()) for reference in step_references
        ]
        total_flops = max(whole.record.flops_so_far for whole in step_references[-1].tensors.values())
        evaluation_tensors = build_reference_tensors(
            each._replace(flops_so_far=total_flops) for each in _record_evaluation(rank_subject)
        )
        trajectory_references[-1] = replace(
            trajectory_references[-1], tensors={**trajectory_references[-1].tensors, **evaluation_tensors}
        )
        if self_difference := _find_self_difference(rank_subject, step_references[-1], subject.steps - 1, folder):
            return ReferenceRuns(step_references, trajectory_references, folder, self_difference)
        for seed in range(PERTURBED_RUNS):
            for step, reference in enumerate(step_references):
                _restore_perturbed(rank_subject, folder, step, seed)
                _add_noise(reference, run_recorded_step(rank_subject, step))
            _restore_perturbed(rank_subject, folder, 0, seed)
            for step, reference in enumerate(trajectory_references):
                _add_noise(reference, run_recorded_step(rank_subject, step, evaluates=step == subject.steps - 1))
        _mark_microbatch_dependent(subject, folder, step_references, trajectory_references)
    return ReferenceRuns(step_references, trajectory_references, folder)


def _find_self_difference(
    rank_subject: VerificationSubjectOnRank, reference: ReferenceStep, step: int, folder: Path
) -> tuple[int, TensorDifference] | None:
    """A reference that is not restored cannot be what others are restored from."""
    rank_subject.state.restore(step_checkpoint_path(folder, step))
    records = run_recorded_step(rank_subject, step)
    with codec_numerics():
        first_difference = next(
            (each for each in compare_with_reference(reference, [records]) if not each.is_rounding), None
        )
    return first_difference and (step, first_difference)


@contextmanager
def single_thread() -> Iterator[None]:
    """As ranks have: beside others that wait for each other, more are slower."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)


def _record_reference(rank_subject: VerificationSubjectOnRank, step: int) -> ReferenceStep:
    recorder, counter = TensorRecorder(sketches_shards=False), FlopCounterMode(display=False)
    with counter:
        recorder.flops_so_far = counter.get_total_flops
        record_step(rank_subject.engine, recorder, lambda: rank_subject.step(step, recorder))
    return ReferenceStep(build_reference_tensors(recorder.records), rank_subject.learning_rate(step))


def _restore_perturbed(rank_subject: VerificationSubjectOnRank, folder: Path, step: int, seed: int) -> None:
    """Move each master to one of its neighbours, up or down."""
    rank_subject.state.restore(step_checkpoint_path(folder, step))
    generator = torch.Generator().manual_seed(seed)
    updater = rank_subject.engine.optimizer
    for master in updater.sharded_parameters.local_masters:
        up = torch.rand(master.shape, generator=generator) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(master.dtype)
        master.copy_(torch.nextafter(master, towards))
    updater.sync_parameters()


def run_recorded_step(
    rank_subject: VerificationSubjectOnRank, step: int, sketches_shards: bool = True, evaluates: bool = False
) -> list[RecordedTensor]:
    """A step that is recorded, and the evaluation after it."""
    recorder = TensorRecorder(sketches_shards=sketches_shards)
    record_step(rank_subject.engine, recorder, lambda: rank_subject.step(step, recorder))
    return recorder.records + (_record_evaluation(rank_subject) if evaluates else [])


def _record_evaluation(rank_subject: VerificationSubjectOnRank) -> list[RecordedTensor]:
    recorder = TensorRecorder()
    for name, value in rank_subject.evaluation_metrics().items():
        recorder.add_scalar("evaluation", name, value)
    return recorder.records


def _add_noise(reference: ReferenceStep, records: list[RecordedTensor]) -> None:
    with codec_numerics():
        differences = compare_with_reference(reference, [records])
    for difference in differences:  # of what has another shape now, routed otherwise, nothing can be said
        relative_error = math.inf if difference.reason else difference.relative_error
        reference.noise[difference.key] = max(relative_error, reference.noise.get(difference.key, 0.0))


def _mark_microbatch_dependent(
    subject: VerificationSubject, folder: Path, *reference_lists: Sequence[ReferenceStep]
) -> None:
    """What a cut into single rows changes that has no rows; told by the first step. Some models need two in each."""
    smaller_counts = [
        microbatches for microbatches in range(subject.batch_rows // 2, 1, -1) if subject.batch_rows % microbatches == 0
    ]
    for parts in (subject.batch_rows, *smaller_counts[:1]):
        rank_subject = subject.with_microbatches(parts).build(SINGLE_RANK_GROUP, folder)
        rank_subject.state.restore(step_checkpoint_path(folder, 0))
        try:
            records = run_recorded_step(rank_subject, 0)
        except Exception:  # noqa: BLE001  # models have their own ways to say so
            continue
        with codec_numerics():
            keys = find_microbatch_dependent(reference_lists[0][0], [records])
        for references in reference_lists:
            for reference in references:
                reference.microbatch_dependent.update(keys)
        return


def step_checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def record_phases(
    subject: VerificationSubject, group: RankGroup, folder: Path, checkpoint_subfolder: str
) -> Iterator[tuple[str, int, list[RecordedTensor]]]:
    """All phases of a layout. `own`: the folder inside of `folder` for its own checkpoints."""
    last_step = subject.steps - 1
    rank_subject = subject.build(group, folder / checkpoint_subfolder)
    for step in range(subject.steps):
        rank_subject.state.restore(step_checkpoint_path(folder, step))
        yield FROM_REFERENCE, step, run_recorded_step(rank_subject, step)
    rank_subject = subject.build(group, folder / checkpoint_subfolder)
    for step in range(subject.steps):  # from its own initial values, and evaluated between them as in training
        if step == last_step:
            rank_subject.state.save(step)
        elif step:
            rank_subject.evaluation_metrics()
        yield TRAJECTORY, step, run_recorded_step(rank_subject, step, evaluates=step == last_step)
    rank_subject = subject.build(group, folder / checkpoint_subfolder)
    rank_subject.state.restore(step_checkpoint_path(folder / checkpoint_subfolder, last_step))
    yield RESUMED, last_step, run_recorded_step(rank_subject, last_step, evaluates=True)
    if rank_subject.engine.optimizer.sharded_parameters.updates_on_arrival:  # to look at parameters is to wait for them
        rank_subject = subject.build(group, folder / checkpoint_subfolder)
        for step in range(last_step):
            rank_subject.step(step, TensorRecorder())
        yield (
            UNOBSERVED,
            last_step,
            [
                each
                for each in run_recorded_step(rank_subject, last_step, evaluates=True)
                if each.kind != "starting parameter"
            ],
        )
