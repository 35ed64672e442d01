"""The first tensor, in the order of execution, in which recorded steps differ from the reference."""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.parity.compare.reference_runs import ReferenceRuns
from motet.parity.compare.tensor_differences import TensorDifference, compare_with_reference
from motet.parity.record.recorded_phases import FROM_REFERENCE, PhaseStep
from motet.parity.record.tensor_recorder import RecordsByRank

MAX_NOISE_BOUND = 1e-3  # Where rounding alone is larger, a mistake may be smaller


@dataclass(frozen=True)
class DifferenceAtStep:
    """The difference of a tensor, and the step in which it was computed."""

    at: PhaseStep
    difference: TensorDifference

    def __str__(self) -> str:
        phase_text = "" if self.at.phase == FROM_REFERENCE else f", steps {self.at.phase}"
        return f"{self.difference.key}, step {self.at.step + 1}{phase_text}"


@dataclass(frozen=True)
class Comparison:
    """All recorded steps against the reference, up to the first tensor that differs."""

    worst: DifferenceAtStep
    first: DifferenceAtStep | None
    noise_dominated: tuple[str, ...]  # Tensors that rounding alone changes too much


def compare_recorded_steps(reference_runs: ReferenceRuns, recorded: Mapping[PhaseStep, RecordsByRank]) -> Comparison:
    """Compare step by step; steps after one that differs are not looked at."""
    differences: list[DifferenceAtStep] = []
    for at in recorded:
        of_step = compare_with_reference(reference_runs.reference_for(at), recorded[at])
        differences += [DifferenceAtStep(at, difference) for difference in of_step]
        if not all(difference.is_rounding for difference in of_step):
            break
    worst = max(differences, key=lambda each: each.difference.relative_error)
    if first := next((each for each in differences if not each.difference.is_rounding), None):
        return Comparison(worst, first, ())
    noisy = tuple(str(each) for each in differences if each.difference.bound > MAX_NOISE_BOUND)
    return Comparison(worst, None, noisy)
