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


class RankDigestReport(NamedTuple):
    """Of one rank. Its neighbour is the rank before it, whose work it does again."""

    # Digest of device, threads and versions: where they are the same, so are the bits of what is computed.
    machine_digest: int
    parameters: int  # Digest of what the model computed with, where every rank has all of it, and of its buffers
    states: int  # Digest of masters and moments after the update
    rows: int  # Digest of the numbers of the rows that were read, in any order
    row_count: int
    batches: int  # Digest of what was read
    neighbour_batches: int  # Digest of what the neighbour should have read
    targets: int
    neighbour_targets: int
    gradients: int  # Digest of this rank's share of the sums of gradients
    norm: int  # Of all gradients, by which they are clipped
    squared_norm: int  # Of the norm of that share
    loss: int  # Of the first micro-batch
    neighbour_loss: int  # Of the neighbour's first micro-batch, computed here


@dataclass(frozen=True)
class ExpectedInvariants:
    """What must come out."""

    gradient_groups: RankGroups  # Ranks that have the same share of the sums of gradients
    state_groups: RankGroups  # Ranks that keep the same masters
    rows: range  # That these ranks read together
    targets: float  # As the step has counted them, by which the sums were divided
    # The norm is what ranks find by themselves, but for rounding; not where it was summed up exactly.
    rechecks_norm: bool = True


class InvariantViolation(NamedTuple):
    """An invariant that does not hold."""

    invariant: str  # `parameters`, `states`, `rows`, `batches`, `targets`, `norm`, `gradients` or `loss`
    ranks: tuple[int, ...]  # That are unlike most others; or all that differ, where no side has more
    description: str  # How it shows; a clause


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
    """A float as an integer; every NaN as one."""
    return int(struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))[0])


def bits_to_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def rows_digest(rows: Iterable[int]) -> int:
    """The same in any order. That of several ranks is the sum of theirs."""
    return to_signed_int64(sum(derive_seed("row", row) for row in rows))


def to_signed_int64(value: int) -> int:
    """As a signed integer of 64 bits."""
    return ((value + 2**63) & _MASK) - 2**63


def find_violations(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """Everything that does not hold, what others follow from first."""
    all_ranks = (tuple(range(len(reports))),)
    same_machines = len({report.machine_digest for report in reports}) == 1
    violations = [
        *_check_equal("parameters", "have other parameters or buffers", reports, all_ranks),
        *_check_equal("states", "have other masters or moments", reports, expected.state_groups),
        *_check_rows(reports, expected.rows),
        *_check_neighbours("batches", "reads other data than rank {other} reads for the same rows", reports),
        *_check_neighbours(
            "targets", "counts {mine:g} targets, and rank {other} {theirs:g} for the same rows", reports
        ),
        *_check_target_count(reports, expected.targets),
        *_check_equal("gradients", "have other sums of gradients", reports, expected.gradient_groups),
        *_check_equal("norm", "have another gradient norm", reports, all_ranks),
    ]
    if same_machines:
        violations += _check_neighbours(
            "loss", "has loss {mine!r} in its first micro-batch, and rank {other} {theirs!r}", reports
        )
    return violations + _check_norm(reports, expected)


def _check_equal(
    invariant: str, text: str, reports: Sequence[RankDigestReport], groups: RankGroups
) -> list[InvariantViolation]:
    violations = []
    for ranks in groups:
        outlier_ranks = outliers({rank: getattr(reports[rank], invariant) for rank in ranks})
        if outlier_ranks:
            others = [rank for rank in ranks if rank not in outlier_ranks]
            than = f" than {format_ranks(others)}" if others else " than each other"
            violations.append(
                InvariantViolation(
                    invariant,
                    outlier_ranks,
                    f"{format_ranks(outlier_ranks)} {text if len(outlier_ranks) > 1 else _singular_verb(text)}{than}",
                )
            )
    return violations


def outliers(values: dict[int, int]) -> tuple[int, ...]:
    """Whoever is unlike most; all, where no value has the most."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return ()
    (common, most), (_, next_most) = counts
    return tuple(rank for rank, value in values.items() if most == next_most or value != common)


def _check_rows(reports: Sequence[RankDigestReport], rows: range) -> list[InvariantViolation]:
    digest, count = to_signed_int64(sum(report.rows for report in reports)), sum(report.row_count for report in reports)
    if digest == rows_digest(rows) and count == len(rows):
        return []
    description = f"the {count} rows that ranks have read are not rows {rows.start} to {rows.stop - 1}, each once"
    return [InvariantViolation("rows", tuple(range(len(reports))), description)]


def _check_neighbours(invariant: str, text: str, reports: Sequence[RankDigestReport]) -> list[InvariantViolation]:
    violations = []
    for rank, report in enumerate(reports):
        other = (rank + 1) % len(reports)
        local_value, neighbour_value = getattr(report, invariant), getattr(reports[other], f"neighbour_{invariant}")
        if local_value != neighbour_value:
            description = text.format(
                other=other, mine=bits_to_float(local_value), theirs=bits_to_float(neighbour_value)
            )
            violations.append(
                InvariantViolation(invariant, (rank, other) if rank != other else (rank,), f"rank {rank} {description}")
            )
    return violations


def _check_target_count(reports: Sequence[RankDigestReport], targets: float) -> list[InvariantViolation]:
    """Sums of whole numbers are exact; of others, in any order, they agree to a rounding for each."""
    total = math.fsum(bits_to_float(report.targets) for report in reports)
    if abs(total - targets) <= len(reports) * _EPS * abs(targets):
        return []
    description = f"the step counts {targets:g} targets, where ranks have {total:g}"
    return [InvariantViolation("targets", tuple(range(len(reports))), description)]


def _check_norm(reports: Sequence[RankDigestReport], expected: ExpectedInvariants) -> list[InvariantViolation]:
    """The norm from the gradients of each replica: a rounding for each rank, for the division, and the root."""
    norm, replicas = bits_to_float(reports[0].norm), range(len(expected.gradient_groups[0]))
    for replica in replicas if expected.rechecks_norm and math.isfinite(norm) else ():
        ranks = tuple(found[replica] for found in expected.gradient_groups)
        squared_norm = math.fsum(bits_to_float(reports[rank].squared_norm) for rank in ranks)
        recomputed_norm = math.sqrt(squared_norm) / (expected.targets if expected.targets > 0 else 1.0)
        if abs(recomputed_norm - norm) > (len(reports) + 4) * _EPS * norm:
            return [
                InvariantViolation(
                    "norm",
                    ranks,
                    f"the gradients of {format_ranks(ranks)} have norm {recomputed_norm!r}, and {norm!r} was used",
                )
            ]
    return []


def _singular_verb(text: str) -> str:
    return text.replace("have ", "has ", 1)


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
