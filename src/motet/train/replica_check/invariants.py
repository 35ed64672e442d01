"""The digests that ranks exchange in a replica check, and the invariants between them, in exact pure Python.
All values are 64-bit patterns: digests, counts, and floats as their bits. Every rank gets the reports of all ranks, and
so finds the same violations."""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.seeds import derive_seed

_EPS = 2.0**-53


class RankDigestReport(NamedTuple):
    """The digests of one rank. Its neighbour is the rank before it, whose work it repeats."""

    machine_digest: int  # Device, threads and versions; where they are equal, so are the bits of results
    parameters: int  # Parameters that every rank has in full, and buffers, at the start of the step
    states: int  # Masters and moments after the update
    rows: int  # Indices of the rows that were read, in any order
    row_count: int
    batches: int
    neighbour_batches: int  # The batches that the neighbour should have read
    targets: int
    neighbour_targets: int
    gradients: int  # This rank's shard of the sums of gradients
    norm: int  # The norm of all gradients, which clips them
    squared_norm: int  # The squared norm of this rank's shard
    loss: int  # The loss of the first micro-batch
    neighbour_loss: int  # The loss of the neighbour's first micro-batch, computed here


@dataclass(frozen=True)
class ExpectedInvariants:
    """The values and the groups of equal ranks that a step must have."""

    gradient_groups: RankGroups  # Ranks with the same shard of the sums of gradients
    state_groups: RankGroups  # Ranks with the same masters
    rows: range  # Rows that the ranks read together
    targets: float  # The count that the sums were divided by
    rechecks_norm: bool = True  # The norm follows from the shards up to rounding; not if it was summed exactly


class InvariantViolation(NamedTuple):
    """An invariant that does not hold."""

    invariant: str  # A key of VIOLATION_CAUSES
    ranks: tuple[int, ...]  # The outliers; all that differ if no side has a majority
    description: str  # A clause


VIOLATION_CAUSES = {
    "parameters": "the model of a rank has changed by itself (a fault of memory, say), or was assigned to on one rank",
    "states": "an update came out differently, or what it keeps has changed by itself",
    "rows": "some rows of the global batch count twice or not at all",
    "batches": "a rank reads other files, or another order",
    "targets": "the loss was divided by a wrong count",
    "norm": "ranks scale their updates differently",
    "gradients": "sums came out differently where they must be the same, by a fault of the network or a device",
    "loss": "one of the two devices computes wrongly, or the model draws numbers that do not follow (step, row)",
}


def float_to_bits(value: float) -> int:
    """The bits of a float as an integer; the same for every NaN."""
    return int(struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))[0])


def bits_to_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def rows_digest(rows: Iterable[int]) -> int:
    """Independent of the order. The digest of several ranks is the sum of theirs."""
    return to_signed_int64(sum(derive_seed("row", row) for row in rows))


def to_signed_int64(value: int) -> int:
    """The value modulo 2^64, as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


def find_violations(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """All invariants that do not hold, causes before their effects."""
    all_ranks = (tuple(range(len(reports))),)
    violations = [
        *_check_equal(reports, all_ranks, "parameters", difference="other parameters or buffers"),
        *_check_equal(reports, expected.state_groups, "states", difference="other masters or moments"),
        *_check_rows(reports, expected.rows),
        *_check_neighbours(reports, "batches", "reads other data than rank {other} reads for the same rows"),
        *_check_neighbours(
            reports, "targets", "counts {local:g} targets, and rank {other} {neighbour:g} for the same rows"
        ),
        *_check_target_count(reports, expected.targets),
        *_check_equal(reports, expected.gradient_groups, "gradients", difference="other sums of gradients"),
        *_check_equal(reports, all_ranks, "norm", difference="another gradient norm"),
    ]
    if len({report.machine_digest for report in reports}) == 1:
        text = "has loss {local!r} in its first micro-batch, and rank {other} {neighbour!r}"
        violations += _check_neighbours(reports, "loss", text)
    return violations + _check_norm(reports, expected)


def _check_equal(
    reports: Sequence[RankDigestReport], groups: RankGroups, invariant: str, *, difference: str
) -> Iterator[InvariantViolation]:
    for ranks in groups:
        if differing := outliers({rank: getattr(reports[rank], invariant) for rank in ranks}):
            others = [rank for rank in ranks if rank not in differing]
            verb, than = "have" if len(differing) > 1 else "has", format_ranks(others) if others else "each other"
            yield InvariantViolation(invariant, differing, f"{format_ranks(differing)} {verb} {difference} than {than}")


def outliers(values: dict[int, int]) -> tuple[int, ...]:
    """The ranks without the most common value; all ranks if no value is the most common."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return ()
    (common, most), (_, next_most) = counts
    return tuple(rank for rank, value in values.items() if most == next_most or value != common)


def _check_rows(reports: Sequence[RankDigestReport], rows: range) -> Iterator[InvariantViolation]:
    digest, count = to_signed_int64(sum(report.rows for report in reports)), sum(report.row_count for report in reports)
    if digest != rows_digest(rows) or count != len(rows):
        description = f"the {count} rows that ranks have read are not rows {rows.start} to {rows.stop - 1}, each once"
        yield InvariantViolation("rows", tuple(range(len(reports))), description)


def _check_neighbours(reports: Sequence[RankDigestReport], invariant: str, text: str) -> Iterator[InvariantViolation]:
    for rank, report in enumerate(reports):
        other = (rank + 1) % len(reports)
        local, neighbour = getattr(report, invariant), getattr(reports[other], f"neighbour_{invariant}")
        if local != neighbour:
            clause = text.format(other=other, local=bits_to_float(local), neighbour=bits_to_float(neighbour))
            yield InvariantViolation(invariant, (rank, other) if rank != other else (rank,), f"rank {rank} {clause}")


def _check_target_count(reports: Sequence[RankDigestReport], targets: float) -> Iterator[InvariantViolation]:
    """Sums of integers are exact; other sums agree, in any order, to one rounding per rank."""
    total = math.fsum(bits_to_float(report.targets) for report in reports)
    if not abs(total - targets) <= len(reports) * _EPS * abs(targets):
        description = f"the step counts {targets:g} targets, where ranks have {total:g}"
        yield InvariantViolation("targets", tuple(range(len(reports))), description)


def _check_norm(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    norm, replicas = bits_to_float(reports[0].norm), range(len(expected.gradient_groups[0]))
    for replica in replicas if expected.rechecks_norm and math.isfinite(norm) else ():
        ranks = tuple(group[replica] for group in expected.gradient_groups)
        squared_norm = math.fsum(bits_to_float(reports[rank].squared_norm) for rank in ranks)
        recomputed = math.sqrt(squared_norm) / (expected.targets if expected.targets > 0 else 1.0)
        if abs(recomputed - norm) > (len(reports) + 4) * _EPS * norm:  # roundings of ranks, of the division, the root
            clause = f"the gradients of {format_ranks(ranks)} have norm {recomputed!r}, and {norm!r} was used"
            return [InvariantViolation("norm", ranks, clause)]
    return []


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
