"""A step in the job's own precision: as far from one device as the same additions in other orders are, and no further.

What only rounds too often, a sum kept in bfloat16, is the same in float64. It is judged by the spread of steps on one
device that add up the same micro-batches in other orders.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from motet.parallel.process.process_group import RankGroup
from motet.parity.compare.align_with_reference import ReferenceTensor, TensorKey
from motet.parity.compare.reference_runs import (
    SINGLE_RANK_GROUP,
    run_recorded_step,
    single_thread,
    step_checkpoint_path,
)
from motet.parity.compare.tensor_differences import (
    FLOAT64_EPSILON,
    ReferenceStep,
    TensorDifference,
    build_reference_tensors,
    compare_with_reference,
)
from motet.parity.layout_verdict import LayoutVerdict, format_key
from motet.parity.record.tensor_recorder import RecordedTensor, TensorRecorder
from motet.parity.subjects.job_subject import JobVerificationSubject, JobVerificationSubjectOnRank
from motet.precision.recipe import RECIPES

ORDER_COUNT = 4  # Steps that tell how far apart they may be
# So many standard deviations above their mean is no accident: they are few, and their tails are not normal.
MAX_Z_SCORE = 8.0
MAX_FLIPPED_ROUNDINGS = 4  # So many numbers may be rounded the other way, by a kernel that goes another path
# So often a float32 sum may be multiplied by what is itself rounded, the norm, say: no order of sums shows that.
FLOAT32_ROUNDINGS = 8
MASTER_PREFIX = "master/"
BITWISE_KINDS = ("norm", "state")
MIN_LOG_STD = 0.1  # The standard deviation of a logarithm of distances is not believed to be less


class DifferenceZScore(NamedTuple):
    """How far a tensor is from one device, and how far others are."""

    difference: TensorDifference
    z: float
    typical_error: float  # The distance that other orders have, in the mean

    @property
    def is_rounding(self) -> bool:
        return not self.difference.reason and self.z <= MAX_Z_SCORE

    @property
    def cause(self) -> str:
        difference = self.difference
        return difference.reason or (
            f"it is {difference.relative_error / self.typical_error:.1f} times as far from one device as other orders of the same sums "
            f"(z = {self.z:.0f}), while it is the same in float64: something is rounded that should not be"
        )


@dataclass(frozen=True)
class SummationOrderSpread:
    """A step of one device, and how far the same step with micro-batches in other orders is from it."""

    reference: ReferenceStep
    log_errors: Mapping[TensorKey, Tensor]  # Of distances
    pooled_log_std: Mapping[str, float]  # Kind -> the standard deviation of these, over all tensors of it
    compute_dtype: torch.dtype

    def z_score_of(self, difference: TensorDifference) -> DifferenceZScore:
        if difference.reason:
            return DifferenceZScore(difference, math.inf, 0.0)
        log_errors, reference_tensor = self.log_errors[difference.key], self.reference.tensors[difference.key]
        log_std = max(
            float(log_errors.std()),
            self.pooled_log_std[reference_tensor.key[0]],
            math.sqrt(0.5 / max(1, reference_tensor.value.numel())),
            MIN_LOG_STD,
        )
        log_deviation = _log_error(difference, reference_tensor, self.compute_dtype) - float(log_errors.mean())
        return DifferenceZScore(
            difference,
            log_deviation / (log_std * math.sqrt(1 + 1 / len(log_errors))),
            math.exp(float(log_errors.mean())),
        )


@dataclass(frozen=True)
class NativePrecisionCheck:
    """Of a job in its own precision."""

    subject: JobVerificationSubject
    folder: Path  # Of the state before the step
    microbatch_dependent: set[TensorKey]  # Not compared
    single_batch_tensors: Mapping[TensorKey, ReferenceTensor]  # What one device has that takes the batch at once
    bitwise_reference: ReferenceStep | None  # What every layout has to the bit, where the job promises that
    spread_by_microbatches: dict[int, SummationOrderSpread] = field(default_factory=dict)

    def worst_and_first(
        self, microbatches: int, records_by_rank: Sequence[Sequence[RecordedTensor]]
    ) -> tuple[DifferenceZScore | None, DifferenceZScore | None]:
        """The most unlikely of all tensors, and the first that is none of rounding; of a batch cut into `parts`."""
        z_scores: list[DifferenceZScore] = []
        if RECIPES[self.subject.job.precision.recipe].compute != "float64":  # that has been judged by more
            spread = self._cached_spread(microbatches)
            differences = (
                each
                for each in compare_with_reference(spread.reference, records_by_rank)
                if self._is_compared(each.key)
            )
            z_scores = [spread.z_score_of(each) for each in differences]
        if self.bitwise_reference is not None:
            z_scores += [
                _bitwise_z_score(each)
                for each in compare_with_reference(self.bitwise_reference, records_by_rank)
                if each.key[0] in BITWISE_KINDS and each.relative_error
            ]
        worst = max(z_scores, key=lambda each: each.z, default=None)
        return worst, next((each for each in z_scores if not each.is_rounding), None)

    def _cached_spread(self, microbatches: int) -> SummationOrderSpread:
        if microbatches not in self.spread_by_microbatches:
            with self.subject.numerics(), single_thread():
                self.spread_by_microbatches[microbatches] = self._measure_spread(microbatches)
        return self.spread_by_microbatches[microbatches]

    def _is_compared(self, key: TensorKey) -> bool:
        """Where there are masters they are; stage 3 has no other parameters."""
        recipe = RECIPES[self.subject.job.precision.recipe]
        is_model_parameter = key[0] in ("parameter", "starting parameter") and not key[1].startswith(MASTER_PREFIX)
        return recipe.compute == recipe.master or not is_model_parameter

    def _measure_spread(self, microbatches: int) -> SummationOrderSpread:
        rank_subject, last_step = (
            self.subject.with_microbatches(microbatches).build(SINGLE_RANK_GROUP, self.folder),
            self.subject.steps - 1,
        )
        starting_records = {folds: _record_starting_masters(rank_subject, folds) for folds in (False, True)}

        def record_last_step(row_order: Sequence[int] | None, sketches_shards: bool = True) -> list[RecordedTensor]:
            return starting_records[sketches_shards] + _record_last_step(
                rank_subject.with_row_order(row_order), self.folder, last_step, sketches_shards
            )

        step_level_tensors = build_reference_tensors(
            each for each in record_last_step(None, sketches_shards=False) if each.microbatch < 0
        )
        added_tensors = {
            site: whole for site, whole in step_level_tensors.items() if site not in self.single_batch_tensors
        }
        reference = ReferenceStep(
            {**added_tensors, **self.single_batch_tensors, **step_level_tensors},
            rank_subject.learning_rate(last_step),
            microbatch_dependent=self.microbatch_dependent,
        )
        reordered_records = [
            record_last_step(order) for order in _random_row_orders(self.subject.batch_rows, microbatches)
        ]
        return measure_order_spread(
            reference, reordered_records, getattr(torch, RECIPES[self.subject.job.precision.recipe].compute)
        )


def run_native_reference(
    subject: JobVerificationSubject, folder: Path, microbatch_dependent: set[TensorKey]
) -> NativePrecisionCheck:
    """Do the steps on one device, up to the one that is judged."""
    last_step = subject.steps - 1
    with subject.numerics(), single_thread():
        rank_subject = subject.with_microbatches(1).build(SINGLE_RANK_GROUP, folder)
        for step in range(last_step):
            run_recorded_step(rank_subject, step)
        rank_subject.state.save(last_step)
        single_batch_tensors = build_reference_tensors(
            run_recorded_step(rank_subject, last_step, sketches_shards=False)
        )
        bitwise_reference = None
        if subject.job.run.reproducible:
            reproducible_records = _record_last_step(
                subject.build(SINGLE_RANK_GROUP, folder), folder, last_step, sketches_shards=False
            )
            bitwise_reference = ReferenceStep(
                build_reference_tensors(reproducible_records),
                rank_subject.learning_rate(last_step),
                microbatch_dependent=microbatch_dependent,
            )
        return NativePrecisionCheck(subject, folder, microbatch_dependent, single_batch_tensors, bitwise_reference)


def _record_starting_masters(
    rank_subject: JobVerificationSubjectOnRank, sketches_shards: bool = True
) -> list[RecordedTensor]:
    """Masters as they are made, which no order of sums changes."""
    recorder = TensorRecorder(sketches_shards=sketches_shards)
    for name, shard in rank_subject.engine.optimizer.state().items():
        if name.startswith(MASTER_PREFIX):
            recorder.add_shard("starting parameter", name, shard)
    return recorder.records


def _record_last_step(
    rank_subject: JobVerificationSubjectOnRank, folder: Path, last_step: int, sketches_shards: bool = True
) -> list[RecordedTensor]:
    rank_subject.state.restore(step_checkpoint_path(folder, last_step))
    return run_recorded_step(rank_subject, last_step, sketches_shards)


def _bitwise_z_score(difference: TensorDifference) -> DifferenceZScore:
    reason = difference.reason or 'it has not the bits that one device has, as run.reproducible = "layout" promises'
    return DifferenceZScore(difference._replace(reason=reason), math.inf, 0.0)


def _log_error(difference: TensorDifference, reference_tensor: ReferenceTensor, compute_dtype: torch.dtype) -> float:
    """A rounding of each of its numbers, and of some of what they are computed from, is as good as nothing."""
    kind, dtype = reference_tensor.key[0], getattr(torch, reference_tensor.record.dtype)
    if kind in ("starting parameter", "sample", "random mask") or not dtype.is_floating_point:
        return math.log(max(difference.relative_error, FLOAT64_EPSILON))
    if kind in ("sum", "norm"):  # of what is summed in float32, whatever they are told in
        dtype = torch.float32
    compute_floor = torch.finfo(compute_dtype).eps * math.sqrt(
        MAX_FLIPPED_ROUNDINGS / max(1, reference_tensor.value.numel())
    )
    storage_floor = torch.finfo(dtype).eps * (FLOAT32_ROUNDINGS if dtype.itemsize >= 4 else 1)
    return math.log(max(difference.relative_error, compute_floor, storage_floor))


def measure_order_spread(
    reference: ReferenceStep, reordered_records: Sequence[list[RecordedTensor]], compute_dtype: torch.dtype
) -> SummationOrderSpread:
    errors: dict[TensorKey, list[float]] = {}
    for records in reordered_records:
        for difference in compare_with_reference(reference, [records]):
            errors.setdefault(difference.key, []).append(
                _log_error(difference, reference.tensors[difference.key], compute_dtype)
            )
    log_errors = {site: torch.tensor(each, dtype=torch.float64) for site, each in errors.items()}
    log_errors_by_kind: dict[str, list[Tensor]] = {
        site[0]: [each for other, each in log_errors.items() if other[0] == site[0]] for site in log_errors
    }
    pooled_log_std = {
        kind: math.sqrt(sum(float(e.var()) for e in each) / len(each)) for kind, each in log_errors_by_kind.items()
    }
    return SummationOrderSpread(reference, log_errors, pooled_log_std, compute_dtype)


def _random_row_orders(rows: int, microbatches: int) -> list[list[int]]:
    """Of rows, in which micro-batches stay what they are."""
    microbatch_rows = torch.arange(rows).view(microbatches, -1)
    generators = (torch.Generator().manual_seed(seed) for seed in range(ORDER_COUNT))
    return [
        microbatch_rows[torch.randperm(microbatches, generator=generator)].flatten().tolist()
        for generator in generators
    ]


def record_native_step(subject: JobVerificationSubject, group: RankGroup, folder: Path) -> list[RecordedTensor]:
    """What a rank of a layout has seen in the step."""
    with subject.numerics():
        rank_subject = subject.build(group, folder)
        return _record_starting_masters(rank_subject) + _record_last_step(rank_subject, folder, subject.steps - 1)


def add_native_precision(
    verdict: LayoutVerdict, worst: DifferenceZScore | None, first: DifferenceZScore | None
) -> LayoutVerdict:
    """What is the same in float64 may be wrong all the same."""
    if worst is None:
        return verdict
    with_z_score = replace(verdict, worst_z=worst.z, worst_z_tensor=format_key(worst.difference.key))
    if first is None:
        return with_z_score
    location = f"{format_key(first.difference.key)}, a step in the job's own precision"
    return replace(with_z_score, ok=False, first_difference=location, rank=first.difference.rank, cause=first.cause)
