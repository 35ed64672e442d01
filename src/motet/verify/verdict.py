"""What is found out about a layout: whether it computes the same numbers, and if not, what is the first to differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from motet.core.errors import NumericalMismatchError
from motet.verify.compare import Difference, Reference, compare
from motet.verify.parts import Site
from motet.verify.record import Seen
from motet.verify.runs import ALONE_FROM

JUDGED = 1e-3
"""Where rounding alone is more than this, a mistake may be less."""


@dataclass(frozen=True)
class Verdict:
    """Of one layout."""

    layout: str
    ok: bool
    worst_relative: float
    """Of any tensor that is not the same but for rounding, or of all where there is none."""
    worst_tensor: str
    first_difference: str | None = None
    """The first tensor in the order of execution that is not the same."""
    rank: int | None = None
    """Whose part of it is furthest from what it should be; None: of all together, or of none."""
    cause: str | None = None
    """In words, where a likely one is found."""
    seconds: float = 0.0
    worst_z: float | None = None
    """Of any tensor in the job's own precision, against steps of one device that add in other orders; None: not
    judged."""
    worst_z_tensor: str | None = None
    unjudged: tuple[str, ...] = ()
    """Tensors that rounding alone makes others."""
    failed: bool = False
    """Its ranks did not come to their end, which says nothing of their numbers; the cause is why."""
    exit_code: int = NumericalMismatchError.exit_code
    """Of the command, if it is not ok."""

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["exit_code"]
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }

    def __str__(self) -> str:
        if self.ok:
            own = "" if self.worst_z is None else f"; z {self.worst_z:.1f}, {self.worst_z_tensor}"
            worst = f"worst {self.worst_relative:.1e}, {self.worst_tensor}"
            more = f" and {len(self.unjudged) - 1} more" if len(self.unjudged) > 1 else ""
            own += f"; not judged, since rounding alone changes it: {self.unjudged[0]}{more}" if self.unjudged else ""
            return f"same   {self.layout}: {worst}{own} ({self.seconds:.1f} s)"
        if self.failed:
            return f"FAILED {self.layout}: {self.cause} ({self.seconds:.1f} s)"
        where = f" on rank {self.rank}" if self.rank is not None else ""
        first = f" first in {self.first_difference}{where}:" if self.first_difference else ""
        return f"WRONG  {self.layout}:{first} {self.cause or 'no likely cause was found'} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class Found:
    """A difference, and where in the walk of a layout."""

    phase: str
    step: int
    difference: Difference

    def __str__(self) -> str:
        how = "" if self.phase == ALONE_FROM else f", steps {self.phase}"
        return f"{named(self.difference.site)}, step {self.step + 1}{how}"


def named(site: Site) -> str:
    kind, name = site
    return name if kind in ("sum", "norm", "evaluation") else kind if kind == name else f"{kind} {name}"


def wrong(layout: str, worst: Found, first: Found, cause: Callable[[], str]) -> Verdict:
    found = first.difference
    try:
        said = cause()
    except Exception as error:  # noqa: BLE001  # the place is right without a cause
        said = f"looking for its cause failed: {type(error).__name__}: {error}"
    return Verdict(
        layout, False, worst.difference.relative, str(worst), str(first), found.rank, said or found.what or None
    )


def failed(layout: str, why: str, exit_code: int) -> Verdict:
    return Verdict(layout, False, math.nan, "", cause=why, failed=True, exit_code=exit_code)


def exit_code_of(verdicts: Sequence[Verdict]) -> int:
    """Of a difference, if there is one; else of what failed first."""
    codes = [verdict.exit_code for verdict in verdicts if not verdict.ok]
    return NumericalMismatchError.exit_code if NumericalMismatchError.exit_code in codes else codes[0] if codes else 0


def of_one_device(layout: str, step: int, difference: Difference) -> Verdict:
    """One device, which differs from itself, is no measure for a layout."""
    first = Found("of one device, from its own checkpoint", step, difference)
    kind = difference.site[0]
    if kind == "sample":
        why = "it is given other samples when it asks for the same step again: give each step a seed of its own"
    elif kind in ("starting parameter", "state", "buffer"):
        why = "its checkpoint is not what it was; mend that first"
    else:
        why = "what it computes is not finite, or not the same when it is computed twice; mend that first"
    return wrong(layout, first, first, lambda: f"one device itself does not do the step again: {why}")


def judge(
    reference: Callable[[str, int], Reference],
    walked: Sequence[tuple[str, int]],
    seen: Callable[[str, int], Sequence[Sequence[Seen]]],
) -> tuple[Found, Found | None, tuple[str, ...]]:
    """The worst of all tensors, the first to differ, and what could not be judged; of phases and their steps."""
    every: list[Found] = []
    for phase, step in walked:
        found = [Found(phase, step, each) for each in compare(reference(phase, step), seen(phase, step))]
        every += found
        if first := next((each for each in found if not each.difference.is_rounding), None):
            return _worst(every), first, ()
    return _worst(every), None, tuple(str(each) for each in every if each.difference.bound > JUDGED)


def _worst(every: Sequence[Found]) -> Found:
    return max(every, key=lambda found: found.difference.relative)
