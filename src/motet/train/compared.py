"""What ranks tell of a step that is watched, and what must hold between them: exact, in pure Python.

All numbers are 64-bit patterns: digests, counts, and floats as their bits. Every rank gets the reports of all, and so
comes to the same judgement.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.seeds import derive_seed

_MASK = 2**64 - 1
_EPS = 2.0**-53


class Report(NamedTuple):
    """Of one rank. Its neighbour is the rank before it, whose work it does again."""

    machine: int
    """Digest of device, threads and versions: where they are the same, so are the bits of what is computed."""
    parameters: int
    """Digest of what the model computed with, where every rank has all of it, and of its buffers."""
    states: int
    """Digest of masters and moments after the update."""
    rows: int
    """Digest of the numbers of the rows that were read, in any order."""
    row_count: int
    batches: int
    """Digest of what was read."""
    neighbour_batches: int
    """Digest of what the neighbour should have read."""
    targets: int
    neighbour_targets: int
    gradients: int
    """Digest of this rank's share of the sums of gradients."""
    norm: int
    """Of all gradients, by which they are clipped."""
    squares: int
    """Of the norm of that share."""
    loss: int
    """Of the first micro-batch."""
    neighbour_loss: int
    """Of the neighbour's first micro-batch, computed here."""


@dataclass(frozen=True)
class Expected:
    """What must come out."""

    sums: RankGroups
    """Ranks that have the same share of the sums of gradients."""
    states: RankGroups
    """Ranks that keep the same masters."""
    rows: range
    """That these ranks read together."""
    targets: float
    """As the step has counted them, by which the sums were divided."""
    norm_again: bool = True
    """The norm is what ranks find by themselves, but for rounding; not where it was summed up exactly."""


class Broken(NamedTuple):
    """An invariant that does not hold."""

    what: str
    """`parameters`, `states`, `rows`, `batches`, `targets`, `norm`, `gradients` or `loss`."""
    ranks: tuple[int, ...]
    """That are unlike most others; or all that differ, where no side has more."""
    text: str
    """How it shows; a clause."""


MEANS = {
    "parameters": "the model of a rank has changed by itself (a fault of memory, say), or was assigned to on one rank",
    "states": "an update came out differently, or what it keeps has changed by itself",
    "rows": "some rows of the global batch count twice or not at all",
    "batches": "a rank reads other files, or another order",
    "targets": "the loss was divided by a wrong count",
    "norm": "ranks scale their updates differently",
    "gradients": "sums came out differently where they must be the same, by a fault of the network or a device",
    "loss": "one of the two devices computes wrongly, or the model draws numbers that do not follow (step, row)",
}


def bits_of(value: float) -> int:
    """A float as an integer; every NaN as one."""
    return int(struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))[0])


def float_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def rows_digest(rows: Iterable[int]) -> int:
    """The same in any order. That of several ranks is the sum of theirs."""
    return wrapped(sum(derive_seed("row", row) for row in rows))


def wrapped(number: int) -> int:
    """As a signed integer of 64 bits."""
    return ((number + 2**63) & _MASK) - 2**63


def broken(reports: Sequence[Report], expected: Expected) -> list[Broken]:
    """Everything that does not hold, what others follow from first."""
    everyone = (tuple(range(len(reports))),)
    alike = len({report.machine for report in reports}) == 1
    found = [
        *_unlike("parameters", "have other parameters or buffers", reports, everyone),
        *_unlike("states", "have other masters or moments", reports, expected.states),
        *_rows(reports, expected.rows),
        *_neighbours("batches", "reads other data than rank {other} reads for the same rows", reports),
        *_neighbours("targets", "counts {mine:g} targets, and rank {other} {theirs:g} for the same rows", reports),
        *_counted(reports, expected.targets),
        *_unlike("gradients", "have other sums of gradients", reports, expected.sums),
        *_unlike("norm", "have another gradient norm", reports, everyone),
    ]
    if alike:
        found += _neighbours("loss", "has loss {mine!r} in its first micro-batch, and rank {other} {theirs!r}", reports)
    return found + _norm(reports, expected)


def _unlike(what: str, text: str, reports: Sequence[Report], sets: RankGroups) -> list[Broken]:
    found = []
    for ranks in sets:
        odd = odd_ones({rank: getattr(reports[rank], what) for rank in ranks})
        if odd:
            others = [rank for rank in ranks if rank not in odd]
            than = f" than {named(others)}" if others else " than each other"
            found.append(Broken(what, odd, f"{named(odd)} {text if len(odd) > 1 else _one(text)}{than}"))
    return found


def odd_ones(values: dict[int, int]) -> tuple[int, ...]:
    """Whoever is unlike most; all, where no value has the most."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return ()
    (common, most), (_, next_most) = counts
    return tuple(rank for rank, value in values.items() if most == next_most or value != common)


def _rows(reports: Sequence[Report], rows: range) -> list[Broken]:
    digest, count = wrapped(sum(report.rows for report in reports)), sum(report.row_count for report in reports)
    if digest == rows_digest(rows) and count == len(rows):
        return []
    text = f"the {count} rows that ranks have read are not rows {rows.start} to {rows.stop - 1}, each once"
    return [Broken("rows", tuple(range(len(reports))), text)]


def _neighbours(what: str, text: str, reports: Sequence[Report]) -> list[Broken]:
    found = []
    for rank, report in enumerate(reports):
        other = (rank + 1) % len(reports)
        mine, theirs = getattr(report, what), getattr(reports[other], f"neighbour_{what}")
        if mine != theirs:
            said = text.format(other=other, mine=float_of(mine), theirs=float_of(theirs))
            found.append(Broken(what, (rank, other) if rank != other else (rank,), f"rank {rank} {said}"))
    return found


def _counted(reports: Sequence[Report], targets: float) -> list[Broken]:
    """Sums of whole numbers are exact; of others, in any order, they agree to a rounding for each."""
    total = math.fsum(float_of(report.targets) for report in reports)
    if abs(total - targets) <= len(reports) * _EPS * abs(targets):
        return []
    text = f"the step counts {targets:g} targets, where ranks have {total:g}"
    return [Broken("targets", tuple(range(len(reports))), text)]


def _norm(reports: Sequence[Report], expected: Expected) -> list[Broken]:
    """The norm from the gradients of each replica: a rounding for each rank, for the division, and the root."""
    norm, replicas = float_of(reports[0].norm), range(len(expected.sums[0]))
    for replica in replicas if expected.norm_again and math.isfinite(norm) else ():
        ranks = tuple(found[replica] for found in expected.sums)
        squares = math.fsum(float_of(reports[rank].squares) for rank in ranks)
        again = math.sqrt(squares) / (expected.targets if expected.targets > 0 else 1.0)
        if abs(again - norm) > (len(reports) + 4) * _EPS * norm:
            return [
                Broken("norm", ranks, f"the gradients of {named(ranks)} have norm {again!r}, and {norm!r} was used")
            ]
    return []


def _one(text: str) -> str:
    return text.replace("have ", "has ", 1)


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
