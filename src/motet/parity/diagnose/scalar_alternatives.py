"""Values that a mean loss, a count of targets or a squared norm of gradients would have after one of several mistakes.

Each generator yields descriptions and values, in the order in which they are tried.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from motet.parity.diagnose.single_device_recompute import MicroBatchResult

Alternatives = Iterator[tuple[str, float]]
SquaresByRank = Sequence[Mapping[str, float]]  # Parameter -> squared norm of the gradient that a rank has
MAX_SUBSET_TENSORS = 16  # With more tensors only one alone, or all that are smaller than one, may be wrong


def alternative_losses(results: Sequence[MicroBatchResult]) -> Alternatives:
    """Means of the loss over wrong targets, or with a wrong divisor."""
    total, count = sum(float(r.loss_sum) for r in results), sum(r.target_count for r in results)
    if not count:
        return
    by_rank = _sums_by_rank(results)
    means = [loss / targets for loss, targets in by_rank.values() if targets]
    yield "it is the mean of the means of ranks, instead of that over all targets", sum(means) / len(means)
    means = [float(r.loss_sum) / r.target_count for r in results if r.target_count]
    yield "it is the mean of the means of micro-batches, instead of that over all targets", sum(means) / len(means)
    yield "it is the sum of the losses, not divided by the count of targets", total
    for rank, (loss, targets) in by_rank.items():
        if targets:
            yield f"it is that of rank {rank} alone", loss / targets
            yield f"it is the sum over all ranks, divided by the count of rank {rank} alone", total / targets
        yield f"the loss of rank {rank} alone is divided by the count of all", loss / count
        if count > targets:
            yield f"it lacks rank {rank}", (total - loss) / (count - targets)


def alternative_counts(results: Sequence[MicroBatchResult], tokens: int) -> Alternatives:
    """Counts of wrong targets."""
    total = sum(r.target_count for r in results)
    yield "all tokens are counted, instead of the targets alone", float(tokens)
    last = {r.rank: r for r in results}.values()
    most = max((r.microbatch for r in last), default=0)
    if padding := [r.target_count for r in last if r.microbatch < most]:
        words = "rows that ranks compute once more, since others have more of them, are counted again"
        yield words, total + sum(padding)
    by_rank, ranks_by_count = _sums_by_rank(results), dict[float, list[str]]()
    for rank, (_, targets) in by_rank.items():
        ranks_by_count.setdefault(targets, []).append(str(rank))
    named = [(targets, " or ".join(ranks)) for targets, ranks in ranks_by_count.items()]
    for targets, ranks in named:
        yield f"it is that of rank {ranks} alone: the sum over the ranks is missing", targets
    subsets = [(targets, f"rank {ranks}") for targets, ranks in named]
    subsets += [(r.target_count, f"micro-batch {r.microbatch} of rank {r.rank}") for r in results]
    for targets, subset in subsets:
        yield f"it lacks that of {subset}", total - targets
        yield f"it has that of {subset} twice", total + targets
    yield "it is the mean over the ranks, instead of the sum", total / max(len(by_rank), 1)
    yield "it is the number of micro-batches", float(len(results))
    for microbatch in sorted({r.microbatch for r in results}):
        counted = sum(r.target_count for r in results if r.microbatch == microbatch)
        yield f"only micro-batch {microbatch} of each rank is counted", counted


def _sums_by_rank(results: Sequence[MicroBatchResult]) -> dict[int, tuple[float, float]]:
    """Rank -> sum of losses, count of targets."""
    sums: dict[int, tuple[float, float]] = {}
    for r in results:
        loss, targets = sums.get(r.rank, (0.0, 0.0))
        sums[r.rank] = loss + float(r.loss_sum), targets + r.target_count
    return sums


def alternative_squares(squares_by_rank: SquaresByRank, expected_square: float, target_count: float) -> Alternatives:
    """Squares of wrong norms."""
    yield "it is not divided by the count of target tokens", expected_square * target_count**2
    for rank, squares in enumerate(squares_by_rank):
        local_square = sum(squares.values())
        yield f"it is that of what rank {rank} has alone: the sum over the ranks is missing", local_square
        yield f"it lacks what rank {rank} has", expected_square - local_square
        yield f"it has what rank {rank} has twice", expected_square + local_square
    names = sorted({name for squares in squares_by_rank for name in squares})
    largest = {name: max(squares.get(name, 0.0) for squares in squares_by_rank) for name in names}
    words = "it is the sum of the norms of the tensors, not the root of the sum of their squares"
    yield words, sum(math.sqrt(square) for square in largest.values()) ** 2
    yield "it is the largest norm of any tensor", max(largest.values(), default=0.0)
    replicated = [name for name in names if len({squares.get(name) for squares in squares_by_rank}) == 1]
    repeated_squares = sum(largest[name] for name in replicated) * (len(squares_by_rank) - 1)
    words = f"{join_names(replicated)} are counted {len(squares_by_rank)} times, once by each rank"
    yield words, expected_square + repeated_squares
    total = {name: sum(squares.get(name, 0.0) for squares in squares_by_rank) for name in names}
    yield "squares of all ranks are added, of replicas too", sum(total.values())


def find_tensor_subset(squares_by_rank: SquaresByRank, excess: float, tolerance: float) -> list[str]:
    """The fewest tensors whose squares, of all ranks or of the rank with most of them, sum to the excess."""
    names = sorted({name for squares in squares_by_rank for name in squares if squares[name]})
    if not names:
        return []
    rows = [[squares.get(name, 0.0) for squares in squares_by_rank] for name in names]
    matrix = torch.tensor(rows, dtype=torch.float64)
    summed, largest = matrix.sum(1), matrix.amax(1)
    if len(names) <= MAX_SUBSET_TENSORS:
        subsets = ((torch.arange(1, 2 ** len(names))[:, None] >> torch.arange(len(names))) & 1).double()
    else:
        subsets = torch.cat([torch.eye(len(names)), (summed[None] <= summed[:, None])]).double()
    for squares_of_names in (summed, largest):
        fitting = subsets[(subsets @ squares_of_names - abs(excess)).abs() <= tolerance]
        if len(fitting):
            smallest = fitting[fitting.sum(1).argmin()].tolist()
            return [name for name, is_member in zip(names, smallest, strict=True) if is_member]
    return []


def join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "no tensors"
