"""Why a single number differs: the mean loss, the count of targets, the norm of the gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from motet.parity.compare.align_with_reference import RankRecords
from motet.parity.diagnose.contribution_hypotheses import MicroBatchContribution, explain_by_enumeration
from motet.parity.diagnose.linear_fit import (
    TARGET_TOKENS,
    factor_meaning,
    format_factor,
    is_about,
    is_equal_up_to_rounding,
)
from motet.parity.diagnose.mismatch_hypotheses import TensorMismatch, explain_mismatch
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.record.tensor_recorder import RecordedTensor

SCALAR_TOLERANCE = 1e-10
MAX_SUBSET_TENSORS = 16  # Of which any may be wrong; of more, one alone, or all that are smaller than one


def is_near(a: float, b: float) -> bool:
    return abs(a - b) <= SCALAR_TOLERANCE * max(abs(a), abs(b))


def explain_scalar(
    value: float,
    expected: float,
    alternatives: Iterator[tuple[str, float]],
    known_factors: Mapping[str, float],
    contributions: Sequence[MicroBatchContribution] = (),
) -> str:
    """`others`: in words -> what it might be. `shares`: of whose sum it is the mean."""
    for description, alternative in alternatives:
        if is_near(value, alternative) and not is_near(alternative, expected):
            return description
    total = torch.tensor(value * sum(share.target_count for share in contributions), dtype=torch.float64)
    if contributions and (cause_text := explain_by_enumeration(total, contributions, "the loss of ")):
        return cause_text
    factor = value / expected if expected else math.nan
    if cause_text := factor_meaning(factor, known_factors):
        return f"it is {format_factor(factor)} times what it should be{cause_text}"
    value_pair = torch.tensor([value, expected], dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        is_close = abs(value - expected) <= torch.finfo(dtype).eps * abs(expected)
        if is_close and (value_pair.to(dtype).double() == value_pair).tolist() == [True, False]:
            return f"it has no more bits than {str(dtype).removeprefix('torch.')} has"
    return ""


def explain_loss(
    records: RankRecords, results: Sequence[MicroBatchResult], known_factors: Mapping[str, float], tokens: int
) -> str:
    """Of micro-batches, each against what one device has for it."""
    results_by_microbatch = {(c.rank, c.microbatch): c for c in results}
    wrong = {
        (rank, seen.microbatch): (seen.value, expected_result)
        for rank, seen in records
        if (expected_result := results_by_microbatch.get((rank, seen.microbatch))) is not None
        and not is_equal_up_to_rounding(seen.value, expected_result.loss_sum)
    }
    if not wrong:
        return (
            "each micro-batch has the loss that one device has for its rows: the loss depends on how the batch is cut "
            "(one over pairs of rows, say)"
        )
    (rank, _), (value, expected_result) = next(iter(wrong.items()))
    factors = {f"{TARGET_TOKENS} of the micro-batch": expected_result.target_count}
    if tokens:
        factors["the count of all its tokens"] = tokens / len(results)
    cause_text = explain_mismatch(TensorMismatch(value, expected_result.loss_sum, rank, {**known_factors, **factors}))
    which_microbatches = f" (in {len(wrong)} of {len(results)} micro-batches, the first of rank {rank})"
    return cause_text and cause_text + (which_microbatches if len(wrong) < len(results) else "")


def alternative_losses(results: Sequence[MicroBatchResult]) -> Iterator[tuple[str, float]]:
    """What the mean loss might be."""
    by_rank = _sum_by_rank(results)
    total, count = sum(float(c.loss_sum) for c in results), sum(c.target_count for c in results)
    if not count:
        return
    means = [loss / targets for loss, targets in by_rank.values() if targets]
    yield "it is the mean of the means of ranks, instead of that over all targets", sum(means) / len(means)
    microbatch_means = [float(c.loss_sum) / c.target_count for c in results if c.target_count]
    yield (
        "it is the mean of the means of micro-batches, instead of that over all targets",
        sum(microbatch_means) / len(microbatch_means),
    )
    yield "it is the sum of the losses, not divided by the count of targets", total
    for rank, (loss, targets) in by_rank.items():
        if targets:
            yield f"it is that of rank {rank} alone", loss / targets
            yield f"it is the sum over all ranks, divided by the count of rank {rank} alone", total / targets
        yield f"the loss of rank {rank} alone is divided by the count of all", loss / count
        if count > targets:
            yield f"it lacks rank {rank}", (total - loss) / (count - targets)


def alternative_counts(results: Sequence[MicroBatchResult], tokens: int) -> Iterator[tuple[str, float]]:
    """What the count of targets might be."""
    by_rank = _sum_by_rank(results)
    total = sum(result.target_count for result in results)
    yield "all tokens are counted, instead of the targets alone", float(tokens)
    padding_results = _padding_microbatches(results)
    if padding_results:
        description = "rows that ranks compute once more, since others have more of them, are counted again"
        yield description, total + sum(c.target_count for c in padding_results)
    ranks_by_count: dict[float, list[str]] = {}
    for rank, (_, targets) in by_rank.items():
        ranks_by_count.setdefault(targets, []).append(str(rank))
    rank_text_by_count = {targets: " or ".join(ranks) for targets, ranks in ranks_by_count.items()}
    for targets, rank_text in rank_text_by_count.items():
        yield f"it is that of rank {rank_text} alone: the sum over the ranks is missing", targets
    for targets, rank_text in rank_text_by_count.items():
        yield f"it lacks that of rank {rank_text}", total - targets
        yield f"it has that of rank {rank_text} twice", total + targets
    for c in results:
        yield f"it lacks that of micro-batch {c.microbatch} of rank {c.rank}", total - c.target_count
        yield f"it has that of micro-batch {c.microbatch} of rank {c.rank} twice", total + c.target_count
    yield "it is the mean over the ranks, instead of the sum", total / len(by_rank)
    yield "it is the number of micro-batches", float(len(results))
    for microbatch in sorted({c.microbatch for c in results}):
        microbatch_count = sum(c.target_count for c in results if c.microbatch == microbatch)
        yield f"only micro-batch {microbatch} of each rank is counted", microbatch_count


def _padding_microbatches(results: Sequence[MicroBatchResult]) -> list[MicroBatchResult]:
    """The last micro-batch of each rank that has fewer of them than others."""
    last_results = {c.rank: c for c in results}
    return [c for c in last_results.values() if c.microbatch < max(other.microbatch for other in last_results.values())]


def _sum_by_rank(results: Sequence[MicroBatchResult]) -> dict[int, tuple[float, float]]:
    sums: dict[int, tuple[float, float]] = {}
    for result in results:
        loss, targets = sums.get(result.rank, (0.0, 0.0))
        sums[result.rank] = loss + float(result.loss_sum), targets + result.target_count
    return sums


def explain_norm(
    value: float,
    expected: float,
    records_by_rank: Sequence[Sequence[RecordedTensor]],
    count: float,
    known_factors: Mapping[str, float],
) -> str:
    """From the gradients that each rank has."""
    squares_by_rank: list[dict[str, float]] = [
        {s.name: s.squared_norm / count**2 for s in seen if s.kind == "gradient"} for seen in records_by_rank
    ]
    squares, expected_square = value**2, expected**2
    factor = squares / expected_square if expected_square else math.nan
    cause_text = factor_meaning(factor, known_factors)
    if cause_text or (round(factor) > 1 and is_about(factor, round(factor))):
        return f"squares are counted {format_factor(factor)} times{cause_text.removesuffix(': counted twice')}"
    for description, alternative in _alternative_squares(squares_by_rank, expected_square, count):
        if is_near(squares, alternative) and not is_near(alternative, expected_square):
            return description
    if cause_text := _explain_tensor_subset(
        squares_by_rank, squares - expected_square, SCALAR_TOLERANCE * expected_square
    ):
        return cause_text
    cause_text = factor_meaning(value / expected, known_factors) if expected else ""
    return f"it is {format_factor(value / expected)} times what it should be{cause_text}" if cause_text else ""


def _alternative_squares(
    squares_by_rank: list[dict[str, float]], expected_square: float, count: float
) -> Iterator[tuple[str, float]]:
    yield "it is not divided by the count of target tokens", expected_square * count**2
    for rank, squares in enumerate(squares_by_rank):
        yield f"it is that of what rank {rank} has alone: the sum over the ranks is missing", sum(squares.values())
        yield f"it lacks what rank {rank} has", expected_square - sum(squares.values())
        yield f"it has what rank {rank} has twice", expected_square + sum(squares.values())
    names = sorted({name for squares in squares_by_rank for name in squares})
    largest = {name: max(squares.get(name, 0.0) for squares in squares_by_rank) for name in names}
    total = {name: sum(squares.get(name, 0.0) for squares in squares_by_rank) for name in names}
    yield (
        "it is the sum of the norms of the tensors, not the root of the sum of their squares",
        (sum(math.sqrt(part) for part in largest.values()) ** 2),
    )
    yield "it is the largest norm of any tensor", max(largest.values(), default=0.0)
    replicated_names = [name for name in names if len({squares.get(name) for squares in squares_by_rank}) == 1]
    repeated_squares = sum(largest[name] for name in replicated_names) * (len(squares_by_rank) - 1)
    yield (
        f"{join_names(replicated_names)} are counted {len(squares_by_rank)} times, once by each rank",
        expected_square + repeated_squares,
    )
    yield "squares of all ranks are added, of replicas too", sum(total.values())


def _explain_tensor_subset(squares_by_rank: list[dict[str, float]], excess: float, tolerance: float) -> str:
    """Some of the tensors, in full or as most of them is on one rank, whose squares are there twice, or not at all."""
    names = sorted({name for squares in squares_by_rank for name in squares if squares[name]})
    summed = torch.tensor(
        [sum(squares.get(name, 0.0) for squares in squares_by_rank) for name in names], dtype=torch.float64
    )
    largest = torch.tensor(
        [max(squares.get(name, 0.0) for squares in squares_by_rank) for name in names], dtype=torch.float64
    )
    if len(names) <= MAX_SUBSET_TENSORS:
        subsets = (torch.arange(1, 2 ** len(names))[:, None] >> torch.arange(len(names))) & 1
    else:
        subsets = torch.cat([torch.eye(len(names)), (summed[None] <= summed[:, None]).double()])
    for tensor_squares in (summed, largest):
        fitting = subsets[(subsets.double() @ tensor_squares - abs(excess)).abs() <= tolerance]
        if len(fitting):
            smallest_subset = fitting[fitting.sum(1).argmin()]
            subset_names = [name for name, is_there in zip(names, smallest_subset.tolist(), strict=True) if is_there]
            return f"it lacks {join_names(subset_names)}" if excess < 0 else f"it has {join_names(subset_names)} twice"
    return ""


def join_names(names: Sequence[str]) -> str:
    first_names = list(names[:3])
    return (
        ", ".join(first_names) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if first_names
        else "no tensors"
    )
