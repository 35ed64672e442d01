"""The verdict on a layout: whether it computes the same as one device, and if not, its first difference and why."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from motet.core.errors import ReplicaMismatchError
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.sync_groups import DATA_DIMENSIONS
from motet.parity.compare.native_precision import MAX_Z_SCORE, LossScaleMistake, find_loss_scale_mistake
from motet.parity.compare.reference_runs import Comparison, DifferenceAtStep, compare_recorded_steps
from motet.parity.compare.tensor_differences import TensorDifference
from motet.parity.diagnose.hypotheses import find_likely_cause
from motet.parity.diagnose.native_differences import NativeComparison
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.full_vocabulary import HeadVerdict
from motet.parity.record.record_verification_steps import CHANGED_BUFFER, RESUMED, RecordedStepKey
from motet.parity.record.tensor_recorder import RecordsByRank

UNPLACED = "neither one device nor the plan says where its rows and shards are"


@dataclass(frozen=True)
class LayoutVerdict:
    """The result of the verification of one layout."""

    layout: str
    ok: bool
    worst_relative: float  # Largest difference up to and including the first step that differs
    worst_tensor: str
    first_difference: str | None = None  # The first tensor that differs, in the order of execution
    rank: int | None = None  # The rank whose part differs most; None: all ranks together
    cause: str | None = None
    seconds: float = 0.0
    worst_z: float | None = None  # Largest z-score in the job's own precision; None: not compared
    worst_z_tensor: str | None = None
    recipe: str = ""  # Recipe of that precision
    worst_bound: float = 0.0  # Largest `worst_relative` allowed
    activations: int = 0  # Outputs of modules and their gradients on one device
    noise_dominated: tuple[str, ...] = ()  # Tensors that rounding alone changes too much
    unplaced: tuple[str, ...] = ()  # Tensors whose rows and shards nothing shows; not compared
    coordinates: str = ""  # The rank's coordinates, unless all dimensions are those of data parallelism
    failed: bool = False  # The ranks failed, for the reason in `cause`; nothing is known of their numbers
    exit_code: int = ReplicaMismatchError.exit_code  # The command's, if the verdict is not ok

    def as_json(self) -> dict[str, Any]:
        """All fields but the exit code; numbers that are not finite are null."""
        fields = {name: value for name, value in asdict(self).items() if name != "exit_code"}
        infinite = {n for n, value in fields.items() if isinstance(value, float) and not math.isfinite(value)}
        return fields | dict.fromkeys(infinite)

    def __str__(self) -> str:
        seconds = f"({self.seconds:.1f} s)"
        if self.ok:
            text = (
                f"same   {self.layout}: largest difference {self.worst_relative:.1e} of {self.worst_bound:.0e} allowed"
            )
            if self.worst_z is not None:
                text += f"; in {self.recipe} {max(0.0, self.worst_z):.1f} of {MAX_Z_SCORE:g} allowed"
            if skipped := len({*self.noise_dominated, *self.unplaced}):
                total = max(self.activations, skipped)
                text += f"; {total - skipped} of {total} activations compared (why not the others: --verbose)"
            return f"{text} {seconds}"
        if self.failed:
            return f"FAILED {self.layout}: {self.cause} {seconds}"
        rank = f" on rank {self.rank}{self.coordinates}" if self.rank is not None else ""
        first = f" first in {self.first_difference}{rank}:" if self.first_difference else ""
        return f"WRONG  {self.layout}:{first} {self.cause or 'no likely cause was found'} {seconds}"

    def details(self) -> list[str]:
        """Lines that say which tensors are furthest from one device, and why others are not compared."""
        lines = [f"largest difference: {self.worst_tensor}"] * self.ok
        lines += [f"largest in {self.recipe}: {self.worst_z_tensor}"] * (self.ok and self.worst_z is not None)
        left_out = {"rounding alone changes it": self.noise_dominated, UNPLACED: self.unplaced}
        return lines + [f"not compared, since {why}: {name}" for why, names in left_out.items() for name in names]


def verify_recorded_steps(
    layout: str, recompute: SingleDeviceRecompute, recorded: Mapping[RecordedStepKey, RecordsByRank]
) -> LayoutVerdict:
    """Compare the steps of a layout with one device; where they differ, recompute parts of them to find out why."""
    comparison, cause = compare_recorded_steps(recompute.reference_runs, recorded, recompute.planned), ""
    if first := comparison.first:
        cause = find_likely_cause(replace(recompute, step=first.at.step), recorded[first.at], first)
    dims = recompute.layout.dims
    verdict = make_verdict(layout, comparison, name_coordinates(cause, dims))
    if verdict.ok:
        return add_saved_bytes(verdict, recorded, dims)
    if verdict.rank is None or first is None:
        return verdict
    record, place = first.difference.record, _coordinates(verdict.rank, dims)
    if record is not None and record.stage >= 0:
        place = f"{place.removesuffix(')')}, stage {record.stage}, micro-batch {record.microbatch})"
    return replace(verdict, coordinates=place)


def name_coordinates(text: str, dims: ParallelDims) -> str:
    """Add each rank's coordinates to a sentence, unless all dimensions are those of data parallelism."""
    number = re.compile(r"\d+")

    def name_each(ranks: re.Match[str]) -> str:
        return number.sub(lambda rank: f"{rank[0]}{_coordinates(int(rank[0]), dims)}", ranks[0])

    return re.sub(r"\branks? \d+(?:, \d+)*(?:(?: and| or) \d+)*", name_each, text)


def _coordinates(rank: int, dims: ParallelDims) -> str:
    sizes = {name: size for name, size in reversed(dims.sizes) if size > 1}
    place = " of ".join(f"{name} {dims.coordinates(rank)[name]}" for name in sizes)
    return f" ({place})" if sizes.keys() - set(DATA_DIMENSIONS) else ""


def make_verdict(layout: str, comparison: Comparison, cause: str = "") -> LayoutVerdict:
    """The verdict that follows from a comparison in float64."""
    worst, first, noisy = comparison.worst, comparison.first, comparison.noise_dominated
    error = worst.difference.relative_error
    if first is None:
        return LayoutVerdict(
            layout,
            True,
            error,
            str(worst),
            noise_dominated=noisy,
            unplaced=comparison.unplaced,
            worst_bound=worst.difference.bound,
            activations=comparison.activations,
        )
    return LayoutVerdict(layout, False, error, str(worst), str(first), first.difference.rank, cause or None)


def add_saved_bytes(
    verdict: LayoutVerdict, recorded: Mapping[RecordedStepKey, RecordsByRank], dims: ParallelDims
) -> LayoutVerdict:
    """Fail a layout with right numbers that keeps more for backward than its recomputation allows."""
    at = next((at for at in recorded if at.phase == RESUMED), None)
    by_rank = enumerate(recorded[at]) if at else ()
    excess = next(((rank, r) for rank, records in by_rank for r in records if r.kind == "saved bytes"), None)
    if excess is None:
        return verdict
    rank, record = excess
    location = "the bytes that a block keeps for backward"
    place = _coordinates(rank, dims)
    return replace(verdict, ok=False, first_difference=location, rank=rank, cause=record.name, coordinates=place)


def add_native_comparison(verdict: LayoutVerdict, native: NativeComparison) -> LayoutVerdict:
    """Fail a layout that is right in float64 but wrong in the precision of the job."""
    if (worst := native.worst) is not None:
        recipe = native.native.subject.job.precision.recipe
        verdict = replace(verdict, worst_z=worst.z, worst_z_tensor=str(worst.difference.key), recipe=recipe)
    if (first := native.first()) is None:
        return verdict
    difference, dims = first.difference, native.recompute.layout.dims
    location = f"{difference.key}, step {first.step + 1} in the job's own precision"
    place, cause = (
        "" if difference.rank is None else _coordinates(difference.rank, dims),
        name_coordinates(first.cause, dims),
    )
    return replace(verdict, ok=False, first_difference=location, rank=difference.rank, cause=cause, coordinates=place)


def add_overflow_decisions(
    verdict: LayoutVerdict, records_by_rank: RecordsByRank, dims: ParallelDims, *, is_dynamic: bool
) -> LayoutVerdict:
    """Fail a layout whose ranks disagree on skipping a float16 step, or keep the scale of the loss in their numbers."""
    mistake = find_loss_scale_mistake(records_by_rank, is_dynamic=is_dynamic) or _find_changed_buffer(records_by_rank)
    if mistake is None:
        return verdict
    location, cause = f"{mistake.place}, in the job's own precision", name_coordinates(mistake.cause, dims)
    place = _coordinates(mistake.rank, dims)
    return replace(verdict, ok=False, first_difference=location, rank=mistake.rank, cause=cause, coordinates=place)


def _find_changed_buffer(records_by_rank: RecordsByRank) -> LossScaleMistake | None:
    cause = "a step whose gradients overflow changes it, while a step that updates nothing must leave all buffers"
    numbers = ((rank, record) for rank, records in enumerate(records_by_rank) for record in records)
    changed = (each for each in numbers if each[1].name.startswith(CHANGED_BUFFER) and each[1].value)
    return next((LossScaleMistake(record.name, rank, cause) for rank, record in changed), None)


def failed_verdict(layout: str, reason: str, exit_code: int) -> LayoutVerdict:
    return LayoutVerdict(layout, False, math.nan, "", cause=reason, failed=True, exit_code=exit_code)


def self_difference_verdict(layout: str, step: int, difference: TensorDifference) -> LayoutVerdict:
    """The verdict on one device that differs from itself, with which no layout can be compared."""
    first = DifferenceAtStep(RecordedStepKey("of one device, from its own checkpoint", step), difference)
    if difference.key.kind == "sample":
        reason = "it gets other samples for the same step: give each step another seed"
    elif difference.key.kind in ("starting parameter", "state", "buffer"):
        reason = "its checkpoint has changed; fix that first"
    else:
        reason = "its results are not finite, or differ between two runs; fix that first"
    return make_verdict(layout, Comparison(first, first, ()), f"one device itself does not do the step again: {reason}")


def exit_code_for(verdicts: Sequence[LayoutVerdict | HeadVerdict]) -> int:
    """The exit code of a difference, if there is one; else of the first failure."""
    codes = [verdict.exit_code for verdict in verdicts if not verdict.ok]
    return ReplicaMismatchError.exit_code if ReplicaMismatchError.exit_code in codes else next(iter(codes), 0)
