"""What is found out about a layout: whether it computes the same numbers, and if not, what is the first to differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from motet.core.errors import NumericalMismatchError
from motet.parity.compare.align_with_reference import TensorKey
from motet.parity.compare.reference_runs import FROM_REFERENCE
from motet.parity.compare.tensor_differences import ReferenceStep, TensorDifference, compare_with_reference
from motet.parity.record.tensor_recorder import RecordedTensor

MAX_NOISE_BOUND = 1e-3  # Where rounding alone is more than this, a mistake may be less


@dataclass(frozen=True)
class LayoutVerdict:
    """Of one layout."""

    layout: str
    ok: bool
    worst_relative: float  # Of any tensor that is not the same but for rounding, or of all where there is none
    worst_tensor: str
    first_difference: str | None = None  # The first tensor in the order of execution that is not the same
    rank: int | None = None  # Whose part of it is furthest from what it should be; None: of all together, or of none
    cause: str | None = None  # In words, where a likely one is found
    seconds: float = 0.0
    # Of any tensor in the job's own precision, against steps of one device that add in other orders; None: not judged.
    worst_z: float | None = None
    worst_z_tensor: str | None = None
    noise_dominated: tuple[str, ...] = ()  # Tensors that rounding alone makes others
    failed: bool = False  # Its ranks did not come to their end, which says nothing of their numbers; the cause is why
    exit_code: int = NumericalMismatchError.exit_code  # Of the command, if it is not ok

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["exit_code"]
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }

    def __str__(self) -> str:
        if self.ok:
            suffix = "" if self.worst_z is None else f"; z {self.worst_z:.1f}, {self.worst_z_tensor}"
            worst = f"worst {self.worst_relative:.1e}, {self.worst_tensor}"
            more = f" and {len(self.noise_dominated) - 1} more" if len(self.noise_dominated) > 1 else ""
            suffix += (
                f"; not judged, since rounding alone changes it: {self.noise_dominated[0]}{more}"
                if self.noise_dominated
                else ""
            )
            return f"same   {self.layout}: {worst}{suffix} ({self.seconds:.1f} s)"
        if self.failed:
            return f"FAILED {self.layout}: {self.cause} ({self.seconds:.1f} s)"
        rank_text = f" on rank {self.rank}" if self.rank is not None else ""
        first = f" first in {self.first_difference}{rank_text}:" if self.first_difference else ""
        return f"WRONG  {self.layout}:{first} {self.cause or 'no likely cause was found'} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class DifferenceAtStep:
    """A difference, and where in the walk of a layout."""

    phase: str
    step: int
    difference: TensorDifference

    def __str__(self) -> str:
        phase_text = "" if self.phase == FROM_REFERENCE else f", steps {self.phase}"
        return f"{format_key(self.difference.key)}, step {self.step + 1}{phase_text}"


def format_key(key: TensorKey) -> str:
    kind, name = key
    return name if kind in ("sum", "norm", "evaluation") else kind if kind == name else f"{kind} {name}"


def wrong_verdict(
    layout: str, worst: DifferenceAtStep, first: DifferenceAtStep, find_cause: Callable[[], str]
) -> LayoutVerdict:
    difference = first.difference
    try:
        cause_text = find_cause()
    except Exception as error:  # noqa: BLE001  # the place is right without a cause
        cause_text = f"looking for its cause failed: {type(error).__name__}: {error}"
    return LayoutVerdict(
        layout,
        False,
        worst.difference.relative_error,
        str(worst),
        str(first),
        difference.rank,
        cause_text or difference.reason or None,
    )


def failed_verdict(layout: str, reason: str, exit_code: int) -> LayoutVerdict:
    return LayoutVerdict(layout, False, math.nan, "", cause=reason, failed=True, exit_code=exit_code)


def exit_code_for(verdicts: Sequence[LayoutVerdict]) -> int:
    """Of a difference, if there is one; else of what failed first."""
    exit_codes = [verdict.exit_code for verdict in verdicts if not verdict.ok]
    return (
        NumericalMismatchError.exit_code
        if NumericalMismatchError.exit_code in exit_codes
        else exit_codes[0]
        if exit_codes
        else 0
    )


def self_difference_verdict(layout: str, step: int, difference: TensorDifference) -> LayoutVerdict:
    """One device, which differs from itself, is no measure for a layout."""
    first = DifferenceAtStep("of one device, from its own checkpoint", step, difference)
    kind = difference.key[0]
    if kind == "sample":
        reason = "it is given other samples when it asks for the same step again: give each step a seed of its own"
    elif kind in ("starting parameter", "state", "buffer"):
        reason = "its checkpoint is not what it was; mend that first"
    else:
        reason = "what it computes is not finite, or not the same when it is computed twice; mend that first"
    return wrong_verdict(layout, first, first, lambda: f"one device itself does not do the step again: {reason}")


def find_differences(
    reference_for: Callable[[str, int], ReferenceStep],
    phases: Sequence[tuple[str, int]],
    read_records: Callable[[str, int], Sequence[Sequence[RecordedTensor]]],
) -> tuple[DifferenceAtStep, DifferenceAtStep | None, tuple[str, ...]]:
    """The worst of all tensors, the first to differ, and what could not be judged; of phases and their steps."""
    all_differences: list[DifferenceAtStep] = []
    for phase, step in phases:
        step_differences = [
            DifferenceAtStep(phase, step, each)
            for each in compare_with_reference(reference_for(phase, step), read_records(phase, step))
        ]
        all_differences += step_differences
        if first := next((each for each in step_differences if not each.difference.is_rounding), None):
            return _worst(all_differences), first, ()
    return (
        _worst(all_differences),
        None,
        tuple(str(each) for each in all_differences if each.difference.bound > MAX_NOISE_BOUND),
    )


def _worst(all_differences: Sequence[DifferenceAtStep]) -> DifferenceAtStep:
    return max(all_differences, key=lambda found: found.difference.relative_error)
