"""The first difference of a layout from one device in the job's own precision, and its cause."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from motet.parity.compare.align_with_reference import PlannedRecords
from motet.parity.compare.native_precision import (
    DifferenceZScore,
    NativeReference,
    SummationOrderSpread,
    z_scores_of_step,
)
from motet.parity.compare.reference_runs import DifferenceAtStep, ReferenceRuns
from motet.parity.compare.tensor_differences import TensorDifference, relative_distance
from motet.parity.diagnose.computing_parameters import AFTER_UPDATE, BEFORE_UPDATE, StepMasters
from motet.parity.diagnose.hypotheses import find_likely_cause
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.diagnose.tolerances import wider_tolerances
from motet.parity.record.record_verification_steps import FROM_REFERENCE, NATIVE_PHASE, RecordedStepKey
from motet.parity.record.tensor_recorder import MASTER_PREFIX, RecordsByRank, TensorKind
from motet.parity.subjects.job_subject import JobVerificationSubject

MIN_CLEAR_RATIO = 4.0  # A cause must explain all but the noise; the error is this many times the largest of rounding
MAX_TOLERANCE = 0.1  # With more noise any factor fits


class NativeDifference(NamedTuple):
    """A tensor that differs in the job's own precision."""

    difference: TensorDifference
    step: int
    cause: str


@dataclass(frozen=True)
class NativeComparison:
    """A layout in the job's own precision: its recorded steps, after its initial state and a restored one."""

    native: NativeReference
    spreads: Sequence[SummationOrderSpread]  # One device's last step, and the steps after it; none in float64
    recorded: Mapping[RecordedStepKey, RecordsByRank]
    subject: JobVerificationSubject  # The job in the layout

    @cached_property
    def recompute(self) -> SingleDeviceRecompute:
        native, steps, world = self.native, list(self.native.steps), len(next(iter(self.recorded.values())))
        if self.spreads:
            steps[-1] = self.spreads[0].reference
        plan = self.subject.step_plan(native.inventory, world)
        planned = PlannedRecords(plan, steps[-1].activation_order, steps[-1].row_tokens)
        runs = ReferenceRuns(steps, steps, native.folder, native.inventory)
        return SingleDeviceRecompute(
            self.subject, self.subject.layout_for(world), runs, planned, self.subject.steps - 1
        )

    @cached_property
    def z_scores(self) -> list[DifferenceZScore]:
        """The scores of the step that one device and the layout begin with the same state."""
        return self._z_scores_of(0, self.recorded[RecordedStepKey(NATIVE_PHASE, self.recompute.step)])

    @property
    def worst(self) -> DifferenceZScore | None:
        """The least likely tensor."""
        return max(self.z_scores, key=lambda each: each.z, default=None)

    def _z_scores_of(self, index: int, records: RecordsByRank) -> list[DifferenceZScore]:
        if index and not self.spreads:
            return []
        planned, spread = self.recompute.planned, self.spreads[index] if self.spreads else None
        assert planned is not None
        if index:
            kept = [[record for record in rank_records if record.kind == "sum"] for rank_records in records]
            native = replace(self.native, bitwise_reference=None)
            return list(z_scores_of_step(native, spread, kept, planned=planned))
        return list(z_scores_of_step(self.native, spread, records, planned=planned))

    def first(self) -> NativeDifference | None:
        """The first tensor that rounding does not explain, in the order of execution."""
        return next(self._differences(), None)

    def _differences(self) -> Iterator[NativeDifference]:
        planned, steps = self.recompute.planned, sorted(self.recorded, key=lambda at: at.step)
        assert planned is not None
        masters: StepMasters | None = None
        for at in steps:
            records, index = self.recorded[at], at.step - self.recompute.step
            if masters is not None:
                yield from self._wrong_parameters(masters, at, BEFORE_UPDATE)
            for score in [] if index < 0 else self.z_scores if index == 0 else self._z_scores_of(index, records):
                if not score.is_rounding:
                    yield NativeDifference(score.difference, at.step, self._cause(score, at, records))
            masters = StepMasters(records, planned, masters)
            for difference in masters.differing_copies():
                yield NativeDifference(difference, at.step, difference.reason)
            yield from self._wrong_parameters(masters, at, AFTER_UPDATE)

    def _wrong_parameters(
        self, masters: StepMasters, at: RecordedStepKey, kinds: Sequence[TensorKind]
    ) -> Iterator[NativeDifference]:
        for difference in masters.wrong_parameters(kinds, self.recorded[at]):
            yield NativeDifference(difference, at.step, difference.reason)

    def _cause(self, score: DifferenceZScore, at: RecordedStepKey, records: RecordsByRank) -> str:
        """Words for the mistake, or for how unlikely the difference is."""
        difference = score.difference
        is_clear = not difference.reason and difference.relative_error > MIN_CLEAR_RATIO * self._tolerance(score)
        if not is_clear or at.step != self.recompute.step:
            return score.cause
        located = DifferenceAtStep(RecordedStepKey(FROM_REFERENCE, at.step), difference)
        with wider_tolerances(self._tolerance(score)):
            cause = find_likely_cause(self.recompute, records, located)
        return cause or score.cause

    def _tolerance(self, score: DifferenceZScore) -> float:
        """The distance by which rounding moves the tensor; a master is compared by its change."""
        typical, key = score.typical_error, score.difference.key
        reference = self.spreads[0].reference.value_of(key) if self.spreads else None
        before = self.recompute.state_before_step.get(key.name) if key.name.startswith(MASTER_PREFIX) else None
        if reference is not None and before is not None:
            change = relative_distance(reference.view(-1), before.view(-1))
            typical = typical / change if change else typical
        return min(MAX_TOLERANCE, 2 * typical)
