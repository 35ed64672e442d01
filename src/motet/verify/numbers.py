"""Why a single number differs: the mean loss, the count of targets, the norm of the gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from motet.verify.causes import Case, cause
from motet.verify.equations import TARGETS, fits, is_about, meaning, number
from motet.verify.parts import Given
from motet.verify.record import Seen
from motet.verify.shares import Computed
from motet.verify.sums import Share, counted

CLOSE = 1e-10
MOST_TENSORS = 16
"""Of which any may be wrong; of more, one alone, or all that are smaller than one."""


def near(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


def cause_of_number(
    value: float,
    expected: float,
    others: Iterator[tuple[str, float]],
    sizes: Mapping[str, float],
    shares: Sequence[Share] = (),
) -> str:
    """`others`: in words -> what it might be. `shares`: of whose sum it is the mean."""
    for words, other in others:
        if near(value, other) and not near(other, expected):
            return words
    total = torch.tensor(value * sum(share.targets for share in shares), dtype=torch.float64)
    if shares and (said := counted(total, shares, "the loss of ")):
        return said
    factor = value / expected if expected else math.nan
    if said := meaning(factor, sizes):
        return f"it is {number(factor)} times what it should be{said}"
    told = torch.tensor([value, expected], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        is_close = abs(value - expected) <= torch.finfo(dtype).eps * abs(expected)
        if is_close and (told.to(dtype).double() == told).tolist() == [True, False]:
            return f"it has no more bits than {str(dtype).removeprefix('torch.')} has"
    return ""


def cause_of_loss(given: Given, computed: Sequence[Computed], sizes: Mapping[str, float], tokens: int) -> str:
    """Of micro-batches, each against what one device has for it."""
    known = {(c.rank, c.part): c for c in computed}
    wrong = {
        (rank, seen.part): (seen.value, own)
        for rank, seen in given
        if (own := known.get((rank, seen.part))) is not None and not fits(seen.value, own.loss)
    }
    if not wrong:
        return (
            "each micro-batch has the loss that one device has for its rows: the loss depends on how the batch is cut "
            "(one over pairs of rows, say)"
        )
    (rank, _), (value, own) = next(iter(wrong.items()))
    more = {f"{TARGETS} of the micro-batch": own.targets}
    if tokens:
        more["the count of all its tokens"] = tokens / len(computed)
    said = cause(Case(value, own.loss, rank, {**sizes, **more}))
    alone = f" (in {len(wrong)} of {len(computed)} micro-batches, the first of rank {rank})"
    return said and said + (alone if len(wrong) < len(computed) else "")


def other_losses(computed: Sequence[Computed]) -> Iterator[tuple[str, float]]:
    """What the mean loss might be."""
    by_rank = _by_rank(computed)
    total, count = sum(float(c.loss) for c in computed), sum(c.targets for c in computed)
    if not count:
        return
    means = [loss / targets for loss, targets in by_rank.values() if targets]
    yield "it is the mean of the means of ranks, instead of that over all targets", sum(means) / len(means)
    parts = [float(c.loss) / c.targets for c in computed if c.targets]
    yield "it is the mean of the means of micro-batches, instead of that over all targets", sum(parts) / len(parts)
    yield "it is the sum of the losses, not divided by the count of targets", total
    for rank, (loss, targets) in by_rank.items():
        if targets:
            yield f"it is that of rank {rank} alone", loss / targets
            yield f"it is the sum over all ranks, divided by the count of rank {rank} alone", total / targets
        yield f"the loss of rank {rank} alone is divided by the count of all", loss / count
        if count > targets:
            yield f"it lacks rank {rank}", (total - loss) / (count - targets)


def other_counts(computed: Sequence[Computed], tokens: int) -> Iterator[tuple[str, float]]:
    """What the count of targets might be."""
    by_rank = _by_rank(computed)
    total = sum(c.targets for c in computed)
    yield "all tokens are counted, instead of the targets alone", float(tokens)
    again = _last_of_short_ranks(computed)
    if again:
        words = "rows that ranks compute once more, since others have more of them, are counted again"
        yield words, total + sum(c.targets for c in again)
    alike: dict[float, list[str]] = {}
    for rank, (_, targets) in by_rank.items():
        alike.setdefault(targets, []).append(str(rank))
    owners = {targets: " or ".join(ranks) for targets, ranks in alike.items()}
    for targets, who in owners.items():
        yield f"it is that of rank {who} alone: the sum over the ranks is missing", targets
    for targets, who in owners.items():
        yield f"it lacks that of rank {who}", total - targets
        yield f"it has that of rank {who} twice", total + targets
    for c in computed:
        yield f"it lacks that of micro-batch {c.part} of rank {c.rank}", total - c.targets
        yield f"it has that of micro-batch {c.part} of rank {c.rank} twice", total + c.targets
    yield "it is the mean over the ranks, instead of the sum", total / len(by_rank)
    yield "it is the number of micro-batches", float(len(computed))
    for part in sorted({c.part for c in computed}):
        alone = sum(c.targets for c in computed if c.part == part)
        yield f"only micro-batch {part} of each rank is counted", alone


def _last_of_short_ranks(computed: Sequence[Computed]) -> list[Computed]:
    """The last micro-batch of each rank that has fewer of them than others."""
    last = {c.rank: c for c in computed}
    return [c for c in last.values() if c.part < max(other.part for other in last.values())]


def _by_rank(computed: Sequence[Computed]) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for c in computed:
        loss, targets = found.get(c.rank, (0.0, 0.0))
        found[c.rank] = loss + float(c.loss), targets + c.targets
    return found


def cause_of_norm(
    value: float, expected: float, ranks: Sequence[Sequence[Seen]], count: float, sizes: Mapping[str, float]
) -> str:
    """From the gradients that each rank has."""
    own: list[dict[str, float]] = [
        {s.name: s.squares / count**2 for s in seen if s.kind == "gradient"} for seen in ranks
    ]
    squares, wanted = value**2, expected**2
    factor = squares / wanted if wanted else math.nan
    said = meaning(factor, sizes)
    if said or (round(factor) > 1 and is_about(factor, round(factor))):
        return f"squares are counted {number(factor)} times{said.removesuffix(': counted twice')}"
    for words, other in _other_squares(own, wanted, count):
        if near(squares, other) and not near(other, wanted):
            return words
    if said := _of_some(own, squares - wanted, CLOSE * wanted):
        return said
    said = meaning(value / expected, sizes) if expected else ""
    return f"it is {number(value / expected)} times what it should be{said}" if said else ""


def _other_squares(own: list[dict[str, float]], wanted: float, count: float) -> Iterator[tuple[str, float]]:
    yield "it is not divided by the count of target tokens", wanted * count**2
    for rank, squares in enumerate(own):
        yield f"it is that of what rank {rank} has alone: the sum over the ranks is missing", sum(squares.values())
        yield f"it lacks what rank {rank} has", wanted - sum(squares.values())
        yield f"it has what rank {rank} has twice", wanted + sum(squares.values())
    names = sorted({name for squares in own for name in squares})
    most = {name: max(squares.get(name, 0.0) for squares in own) for name in names}
    total = {name: sum(squares.get(name, 0.0) for squares in own) for name in names}
    yield (
        "it is the sum of the norms of the tensors, not the root of the sum of their squares",
        (sum(math.sqrt(part) for part in most.values()) ** 2),
    )
    yield "it is the largest norm of any tensor", max(most.values(), default=0.0)
    whole = [name for name in names if len({squares.get(name) for squares in own}) == 1]
    extra = sum(most[name] for name in whole) * (len(own) - 1)
    yield f"{listed_names(whole)} are counted {len(own)} times, once by each rank", wanted + extra
    yield "squares of all ranks are added, of replicas too", sum(total.values())


def _of_some(own: list[dict[str, float]], extra: float, close: float) -> str:
    """Some of the tensors, in full or as most of them is on one rank, whose squares are there twice, or not at all."""
    names = sorted({name for squares in own for name in squares if squares[name]})
    whole = torch.tensor([sum(squares.get(name, 0.0) for squares in own) for name in names], dtype=torch.float64)
    largest = torch.tensor([max(squares.get(name, 0.0) for squares in own) for name in names], dtype=torch.float64)
    if len(names) <= MOST_TENSORS:
        some = (torch.arange(1, 2 ** len(names))[:, None] >> torch.arange(len(names))) & 1
    else:
        some = torch.cat([torch.eye(len(names)), (whole[None] <= whole[:, None]).double()])
    for parts in (whole, largest):
        fitting = some[(some.double() @ parts - abs(extra)).abs() <= close]
        if len(fitting):
            fewest = fitting[fitting.sum(1).argmin()]
            meant = [name for name, is_there in zip(names, fewest.tolist(), strict=True) if is_there]
            return f"it lacks {listed_names(meant)}" if extra < 0 else f"it has {listed_names(meant)} twice"
    return ""


def listed_names(names: Sequence[str]) -> str:
    few = list(names[:3])
    return ", ".join(few) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if few else "no tensors"
