"""The digests that ranks exchange in a replica check, and the invariants between them, in exact pure Python.
All values are 64-bit patterns: digests, counts, and floats as their bits. Every rank gets the reports of all ranks, and
so finds the same violations."""

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.seeds import derive_seed
from motet.parallel.step_plan.plan import CopyKind, IdenticalCopies

_EPS = 2.0**-53


class RankDigestReport(NamedTuple):
    """The digests of one rank, which repeats the work of the data rank before it."""

    machine_digest: int  # Device, threads and versions; where they are equal, so are the bits of results
    rows: int  # Indices of the rows that were read, in any order
    row_count: int
    batches: int
    repeated_batches: int  # The batches that the rank before it should have read
    targets: int
    repeated_targets: int
    norm: int  # The norm of all gradients, which clips them
    loss: int  # The loss of the first micro-batch
    repeated_loss: int  # The first loss of the rank before it, computed here
    copies: tuple[int, ...] = ()  # Digests of the rank's shard of each `ExpectedInvariants.copies`
    squared_norms: tuple[int, ...] = ()  # Squared norms of the copies that are gradients

    @classmethod
    def from_integers(cls, numbers: Sequence[int], copies: int) -> "RankDigestReport":
        """The report of integers as `to_integers` gives them, with the digests of `copies`."""
        scalars = len(cls._fields) - 2
        middle = scalars + copies
        return cls._make([*numbers[:scalars], tuple(numbers[scalars:middle]), tuple(numbers[middle:])])

    def to_integers(self) -> list[int]:
        return [*self[:-2], *self.copies, *self.squared_norms]


@dataclass(frozen=True)
class ExpectedInvariants:
    """The values that a step must have, and the ranks that must have the same ones."""

    copies: tuple[IdenticalCopies, ...]
    same_rows: RankGroups  # Ranks that read the same rows
    same_loss: RankGroups  # Ranks that compute the same loss; the others compute none
    reporters: Mapping[str, Collection[int]]  # The ranks whose rows or targets add up to those of the step
    next_ranks: Sequence[int]  # For each rank, the rank that repeats its work
    rows: range  # Rows that the ranks read together
    targets: float  # The count that the sums were divided by
    backward_scale: float = 1.0  # The gradients were divided by it, too
    rechecks_norm: bool = True  # The norm follows from the shards up to rounding; not if it was summed exactly


class InvariantViolation(NamedTuple):
    """An invariant that does not hold."""

    invariant: str  # A key of VIOLATION_CAUSES
    ranks: tuple[int, ...]  # The outliers; all that differ if no side has a majority
    description: str  # A clause
    copies_index: int | None = None  # Index in `ExpectedInvariants.copies`


VIOLATION_CAUSES = {
    "parameters": "the model of a rank has changed by itself (a fault of memory, say), or was assigned to on one rank",
    "states": "an update came out differently, or what it keeps has changed by itself",
    "loads": "ranks have added the loads of experts differently, or a rank has changed them by itself",
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
    """A digest that does not depend on the order. The digest of several ranks is the sum of theirs."""
    return to_signed_int64(sum(derive_seed("row", row) for row in rows))


def to_signed_int64(value: int) -> int:
    """The value modulo 2^64, as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


_DIFFERENCES: Mapping[CopyKind, str] = {
    "parameters": "other parameters or buffers",
    "states": "other masters or moments",
    "gradients": "other sums of gradients",
    "loads": "other loads or corrections of experts",
}


def find_violations(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """All invariants that do not hold, causes before their effects."""
    all_ranks, are_alike = (tuple(range(len(reports))),), len({report.machine_digest for report in reports}) == 1
    computing = {rank for ranks in expected.same_loss for rank in ranks}
    norms = [report.norm for report in reports]
    batches = "reads other data than rank {other} reads for the same rows"
    targets = "counts {local:g} targets, and rank {other} {repeated:g} for the same rows"
    violations = [
        *_check_copies(reports, expected, "parameters"),
        *_check_copies(reports, expected, "states"),
        *_check_copies(reports, expected, "loads"),
        *_check_rows(reports, expected),
        *_check_same_rows(reports, expected),
        *_check_repeated(reports, expected, "batches", text=batches),
        *_check_repeated(reports, expected, "targets", text=targets, ranks=computing),
        *_check_target_count(reports, expected),
        *_check_copies(reports, expected, "gradients"),
        *_check_equal(norms, all_ranks, "norm", difference="another gradient norm"),
    ]
    if are_alike:
        losses = [report.loss for report in reports]
        text = "has loss {local!r} in its first micro-batch, and rank {other} {repeated!r}"
        violations += _check_repeated(reports, expected, "loss", text=text, ranks=computing)
        violations += _check_equal(
            losses, expected.same_loss, "loss", difference="another loss in the first micro-batch"
        )
    return violations + _check_norm(reports, expected)


def _check_copies(
    reports: Sequence[RankDigestReport], expected: ExpectedInvariants, kind: CopyKind
) -> Iterator[InvariantViolation]:
    for index, copies in enumerate(expected.copies):
        if copies.kind == kind:
            values = [report.copies[index] for report in reports]
            for violation in _check_equal(values, copies.rank_groups, kind, difference=_DIFFERENCES[kind]):
                yield violation._replace(copies_index=index)


def _check_equal(
    values: Sequence[int], groups: RankGroups, invariant: str, *, difference: str
) -> Iterator[InvariantViolation]:
    for ranks in groups:
        if differing := outliers({rank: values[rank] for rank in ranks}):
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


def _check_rows(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> Iterator[InvariantViolation]:
    rows, reporting = expected.rows, [reports[rank] for rank in expected.reporters["rows"]]
    digest, count = to_signed_int64(sum(r.rows for r in reporting)), sum(r.row_count for r in reporting)
    if digest != rows_digest(rows) or count != len(rows):
        description = f"the {count} rows that ranks have read are not rows {rows.start} to {rows.stop - 1}, each once"
        yield InvariantViolation("rows", tuple(range(len(reports))), description)


def _check_same_rows(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """Ranks that split one model compute with the same rows."""
    rows, batches = [report.rows for report in reports], [report.batches for report in reports]
    violations = [*_check_equal(rows, expected.same_rows, "rows", difference="read other rows")]
    return violations or [
        *_check_equal(batches, expected.same_rows, "batches", difference="read other data for the same rows")
    ]


def _check_repeated(
    reports: Sequence[RankDigestReport],
    expected: ExpectedInvariants,
    invariant: str,
    *,
    text: str,
    ranks: Collection[int] | None = None,
) -> Iterator[InvariantViolation]:
    for rank in range(len(reports)) if ranks is None else sorted(ranks):
        other = expected.next_ranks[rank]
        local, repeated = getattr(reports[rank], invariant), getattr(reports[other], f"repeated_{invariant}")
        if local != repeated:
            clause = text.format(other=other, local=bits_to_float(local), repeated=bits_to_float(repeated))
            yield InvariantViolation(invariant, (rank, other) if rank != other else (rank,), f"rank {rank} {clause}")


def _check_target_count(
    reports: Sequence[RankDigestReport], expected: ExpectedInvariants
) -> Iterator[InvariantViolation]:
    """Sums of integers are exact; other sums agree, in any order, to one rounding per rank."""
    total = math.fsum(bits_to_float(reports[rank].targets) for rank in expected.reporters["targets"])
    if not abs(total - expected.targets) <= len(reports) * _EPS * abs(expected.targets):
        description = f"the step counts {expected.targets:g} targets, where ranks have {total:g}"
        yield InvariantViolation("targets", tuple(range(len(reports))), description)


def _check_norm(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """Recompute the norm from one rank for each shard: from the first copies, then from the second, and so on."""
    gradients = [copies for copies in expected.copies if copies.kind == "gradients"]
    norm, replicas = bits_to_float(reports[0].norm), max(len(g) for copies in gradients for g in copies.rank_groups)
    # Roundings of each tensor on a rank, of the sum over the ranks, of the division, and of the root.
    roundings = sum(len(copies.names) for copies in gradients) + len(reports) + 4
    for replica in range(replicas) if expected.rechecks_norm and math.isfinite(norm) else ():
        holders = [(i, g[replica % len(g)]) for i, copies in enumerate(gradients) for g in copies.rank_groups]
        squared_norm = math.fsum(bits_to_float(reports[rank].squared_norms[i]) for i, rank in holders)
        recomputed = math.sqrt(squared_norm) / (
            (expected.targets if expected.targets > 0 else 1.0) * expected.backward_scale
        )
        if abs(recomputed - norm) > roundings * _EPS * norm:
            ranks = tuple(sorted({rank for _, rank in holders}))
            clause = f"the gradients of {format_ranks(ranks)} have norm {recomputed!r}, and {norm!r} was used"
            return [InvariantViolation("norm", ranks, clause)]
    return []


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
