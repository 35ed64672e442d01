"""Counts of the numerics monitor, added up by kind of tensor: for the console, the summary and drawings."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from motet.core.errors import check_input
from motet.monitor.events import Event, LostInFormat, NumericsKind, NumericsMeasured, TensorNumerics, effective_events

KINDS: tuple[NumericsKind, ...] = get_args(NumericsKind)


def total_of(kind: NumericsKind, tensors: Iterable[TensorNumerics]) -> TensorNumerics | None:
    """The counts of all tensors of one kind together, None without any."""
    members = [tensor for tensor in tensors if tensor.kind == kind]
    if not members:
        return None
    by_exponent = Counter[int]()
    for tensor in members:
        by_exponent.update(dict(enumerate(tensor.exponents, start=tensor.lowest_exponent)))
    lowest, highest = (min(by_exponent), max(by_exponent)) if by_exponent else (0, -1)
    return TensorNumerics(
        kind=kind,
        name=f"all {len(members)}",
        elements=sum(tensor.elements for tensor in members),
        zeros=sum(tensor.zeros for tensor in members),
        infinite=sum(tensor.infinite for tensor in members),
        nan=sum(tensor.nan for tensor in members),
        formats=tuple(map(_sum_losses, zip(*(tensor.formats for tensor in members), strict=True))),
        lowest_exponent=lowest,
        exponents=tuple(by_exponent[exponent] for exponent in range(lowest, highest + 1)),
    )


def _sum_losses(losses: Sequence[LostInFormat]) -> LostInFormat:
    counts = {key: sum(getattr(each, key) for each in losses) for key in ("vanished", "subnormal", "saturated")}
    return LostInFormat(dtype=losses[0].dtype, **counts)


def loss_in(tensor: TensorNumerics, dtype: str) -> LostInFormat:
    """The losses of one format."""
    return next(each for each in tensor.formats if each.dtype == dtype)


def percent(count: int, elements: int) -> str:
    """A share in per cent, in which something is never 0 and not all is never 100."""
    if count in (0, elements):
        return "0%" if count == 0 else "100%"
    share = 100 * count / elements
    return "<0.1%" if share < 0.1 else ">99.9%" if share > 99.9 else f"{share:.1f}%"


def numerics_line(event: NumericsMeasured, dtype: str) -> str:
    """A measurement in one line: what a format loses of each kind of tensor."""
    parts = []
    for kind in KINDS:
        if total := total_of(kind, event.tensors):
            loss = loss_in(total, dtype)
            shares = {
                "zero": total.zeros,
                "underflow": loss.underflow,
                "overflow": loss.saturated + total.infinite,
                "NaN": total.nan,
            }
            words = [f"{percent(count, total.elements)} {word}" for word, count in shares.items() if count]
            parts.append(f"{kind.replace('_', ' ')} {', '.join(words) or 'all normal'}")
    scale = "" if event.loss_scale is None else f" (gradients x {event.loss_scale})"
    return f"step {event.step} in {dtype}{scale}: {'; '.join(parts)}"


def measurement_at(run: Iterable[Event], step: int | None, where: str) -> NumericsMeasured:
    """The measurement of a step, by default the last one."""
    measured = {event.step: event for event in effective_events(run) if isinstance(event, NumericsMeasured)}
    check_input(
        measured,
        f"{where} has no measurement of the numerics monitor; train with monitor.numerics_every=N to have one every N "
        "steps",
    )
    step = max(measured) if step is None else step
    shown = [*measured] if len(measured) <= 8 else [*list(measured)[:7], "...", max(measured)]
    check_input(
        step in measured,
        f"--step {step}: {where} has measurements of steps {', '.join(map(str, shown))}; give one of these",
    )
    return measured[step]
