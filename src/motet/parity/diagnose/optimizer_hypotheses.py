"""Hypotheses about masters and moments: the inputs of their update.

Hypotheses about scalars: losses, counts of targets and the gradient norm.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from motet.core.units import dtype_name
from motet.parity.compare.tensor_differences import relative_distance
from motet.parity.diagnose import mismatch_evidence as fit
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence, OptimizerEvidence
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate, OptimizerUpdateTerm, weighted_sum
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.diagnose.tensor_hypotheses import EXACT_HYPOTHESES, TENSOR_HYPOTHESES, explain
from motet.parity.diagnose.tolerances import tolerances
from motet.parity.subjects.job_subject import TRAINING_MODE_CALLS


def counts_other_steps(e: MismatchEvidence) -> str:
    return f"it counts {float(e.value):g} steps, where one device has {float(e.expected):g}" if e.name == "step" else ""


def update_differs(e: MismatchEvidence) -> str:
    o = e.optimizer
    if o is None:
        return ""
    update, change = o.update, e.value - o.update.base(o.state_name)
    for words, rate in update.alternative_rates.items():
        if rate != update.learning_rate and _is_result_of(e, o, replace(update, learning_rate=rate)):
            factor = rate / update.learning_rate if update.learning_rate else 0.0
            meaning = fit.factor_meaning(factor, e.known_factors)
            text = f", or with {fit.format_factor(factor)} times its own{meaning}" if meaning else ""
            return f"it was updated with the learning rate of {words}{text}"
    summands = update.summands(o.state_name)
    if text := explain_sum(change, summands, e):
        return text
    for words, alternative in update.alternatives():
        if _is_result_of(e, o, alternative):
            return f"it was updated {words}"
    for words, gradient in o.gradient.alternatives.items():
        if gradient.shape == update.gradient.shape and _is_result_of(e, o, replace(update, gradient=gradient)):
            return f"it was updated with a gradient that is {words}"
    if text := _epsilon_differs(e, o):
        return text
    others = o.other_gradients.items() if o.state_name in ("exp_avg", "momentum_buffer") else ()
    summands += [OptimizerUpdateTerm(words, gradient, 0.0) for words, gradient in others]
    return explain_sum(change, summands, e) or _implied_input_differs(e, o)


def _is_result_of(e: MismatchEvidence, o: OptimizerEvidence, alternative: ExpectedOptimizerUpdate) -> bool:
    base = o.update.base(o.state_name)
    change = alternative.expected_state()[o.state_name] - base
    tolerance = tolerances().update if o.state_name == "master" else tolerances().fit
    is_distinct = relative_distance(e.expected - base, change) > tolerance
    return is_distinct and relative_distance(e.value - base, change) < tolerance


def explain_sum(value: Tensor, summands: Sequence[OptimizerUpdateTerm], e: MismatchEvidence) -> str:
    """Name the terms that the sum has more or less often than it should."""
    present = [s for s in summands if s.expected_factor or float(s.value.abs().max())]
    fitted = fit.solve_coefficients(value, [s.value for s in present]) if value.numel() > len(present) else None
    if not fitted:
        return ""
    ratios = [f / s.expected_factor if s.expected_factor else None for s, f in zip(present, fitted, strict=True)]
    known = {round(ratio, tolerances().digits) for ratio in ratios if ratio is not None}
    if len(present) > 1 and len(known) == 1 and None not in ratios and known != {1.0}:
        return f"all of it counts {_times(fitted[0] / present[0].expected_factor, e)}"
    texts, tolerance = [], tolerances().coefficient
    for (words, _, expected), factor, ratio in zip(present, fitted, ratios, strict=True):
        if abs(factor - expected) <= tolerance * max(abs(expected), tolerance):
            continue
        if ratio is None:
            texts.append(f"{words} is in it, {fit.format_factor(factor)} times, where it should not be")
        else:
            texts.append(f"{words} {'is missing' if fit.is_about(ratio, 0) else f'counts {_times(ratio, e)}'}")
    return "; ".join(texts)


def _times(factor: float, e: MismatchEvidence) -> str:
    return f"{fit.format_factor(factor)} times{fit.factor_meaning(factor, e.known_factors)}"


def _epsilon_differs(e: MismatchEvidence, o: OptimizerEvidence) -> str:
    """Solve for the number that AdamW adds to the root."""
    update = o.update
    if o.state_name != "master" or update.settings.name != "adamw":
        return ""
    mean, root = update.bias_corrected(update.expected_state())
    ratio = (update.master - e.value) / update.learning_rate - update.weight_decay * update.master
    epsilon = float((ratio * (mean - ratio * root)).sum() / ratio.square().sum())
    alternative = replace(update, settings=update.settings.model_copy(update={"eps": epsilon}))
    is_cause = math.isfinite(epsilon) and _is_result_of(e, o, alternative)
    return f"it was updated with eps = {epsilon:.4g}, not {update.settings.eps:g}" if is_cause else ""


def _implied_input_differs(e: MismatchEvidence, o: OptimizerEvidence) -> str:
    """Solve for the moment before the step, or for the gradient, and explain that."""
    if o.state_name == "master":
        return ""
    (_, moment, decay), *new_terms = o.update.summands(o.state_name)
    if decay:
        sources = {f"{name} before the step": tensor for name, tensor in o.state_before.items()}
        implied = (e.value - weighted_sum(new_terms)) / decay
        before = MismatchEvidence(implied, moment, e.rank, e.known_factors, source_tensors=sources)
        if text := explain(before, EXACT_HYPOTHESES):
            return f"its value before the step is wrong: {text}"
    if o.state_name == "exp_avg_sq":
        return ""
    gradient = (e.value - decay * moment) / new_terms[0].expected_factor
    text = explain(replace(o.gradient, value=gradient, expected=o.update.gradient), TENSOR_HYPOTHESES)
    return text and f"the gradient that it was updated with is wrong: {text}"


MEAN_OF_COUNT = {fit.TARGET_TOKENS: "mean loss", "evaluation targets": "evaluation loss"}  # Count -> mean over it
Alternatives = Iterator[tuple[str, float]]
SquaresByRank = Sequence[Mapping[str, float]]  # Parameter -> squared norm of the gradient that a rank has
LOSS_DEPENDS_ON_SPLIT = (
    "each micro-batch has the loss that one device has for its rows: the loss depends on how the batch is split "
    "(one over pairs of rows, say)"
)
MAX_SUBSET_TENSORS = 16  # With more tensors only one alone, or all that are smaller than one, may be wrong


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= tolerances().scalar * max(abs(a), abs(b))


def _first_near(value: float, expected: float, alternatives: Iterable[tuple[str, float]]) -> str:
    return next((words for words, n in alternatives if _is_near(value, n) and not _is_near(n, expected)), "")


def runs_in_training_mode(e: MismatchEvidence) -> str:
    is_count = e.name == TRAINING_MODE_CALLS
    return f"{float(e.value):g} calls are made in training mode, where the model is evaluated" if is_count else ""


def is_another_count_or_loss(e: MismatchEvidence) -> str:
    numbers = _alternative_counts(e) if e.name in MEAN_OF_COUNT else _alternative_losses(e.results)
    return _first_near(float(e.value), float(e.expected), numbers)


def has_other_losses(e: MismatchEvidence) -> str:
    total = e.value * sum(r.target_count for r in e.results)
    return "" if e.name in MEAN_OF_COUNT else fit.explain_by_enumeration(total, _losses(e), "the loss of ")


def _losses(e: MismatchEvidence) -> list[fit.MicroBatchContribution]:
    return [fit.MicroBatchContribution(r.rank, r.microbatch, r.loss_sum, r.target_count) for r in e.results]


def squares_are_multiplied(e: MismatchEvidence) -> str:
    factor = float(e.value) ** 2 / float(e.expected) ** 2 if float(e.expected) else 0.0
    meaning = fit.factor_meaning(factor, e.known_factors)
    if not meaning and (round(factor) <= 1 or not fit.is_about(factor, round(factor))):
        return ""
    return f"squares are counted {fit.format_factor(factor)} times{meaning.removesuffix(': counted twice')}"


def is_another_norm(e: MismatchEvidence) -> str:
    """Compare with the squares of each rank's gradients."""
    count, square, expected = e.source.reference.target_count, float(e.value) ** 2, float(e.expected) ** 2
    squares_by_rank = [
        {record.name: record.squared_norm / count**2 for record in records if record.kind == "gradient"}
        for records in e.source.records_by_rank
    ]
    if words := _first_near(square, expected, _alternative_squares(squares_by_rank, expected, count)):
        return words
    names = _find_tensor_subset(squares_by_rank, square - expected, tolerances().scalar * expected)
    words = f"it leaves out {names}" if square < expected else f"it has {names} twice"
    return words if names else ""


def is_multiplied(e: MismatchEvidence) -> str:
    factor = float(e.value) / float(e.expected) if float(e.expected) else math.nan
    meaning = fit.factor_meaning(factor, e.known_factors)
    return meaning and f"it is {fit.format_factor(factor)} times what it should be{meaning}"


def has_few_bits(e: MismatchEvidence) -> str:
    pair = torch.stack([e.value, e.expected]).double()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        is_close = abs(float(e.value - e.expected)) <= torch.finfo(dtype).eps * abs(float(e.expected))
        if is_close and (pair.to(dtype).double() == pair).tolist() == [True, False]:
            return f"it has no more bits than {dtype_name(dtype)} has"
    return ""


def has_other_targets(e: MismatchEvidence) -> str:
    """The targets of a count are those whose losses are in the sum; counts alone are too small to tell."""
    if e.name not in MEAN_OF_COUNT or e.located is None:
        return ""
    for record in e.located.records_by_rank[e.rank or 0]:
        if record.name == MEAN_OF_COUNT[e.name]:
            return fit.explain_by_enumeration(record.value * e.value, _losses(e), "the contribution of ")
    return ""


def microbatch_loss_differs(e: MismatchEvidence) -> str:
    """Each micro-batch against the loss that one device has for its rows."""
    expected = {(r.rank, r.microbatch): r for r in e.results}
    wrong = [
        (rank, record.value, result)
        for rank, record in e.source.records_by_key[e.source.key]
        if (result := expected.get((rank, record.microbatch))) is not None
        and not fit.is_equal_up_to_rounding(record.value, result.loss_sum)
    ]
    if not wrong:
        return LOSS_DEPENDS_ON_SPLIT
    rank, value, result = wrong[0]
    factors = {**e.known_factors, f"{fit.TARGET_TOKENS} of the micro-batch": result.target_count}
    if e.token_count:
        factors["the count of all its tokens"] = e.token_count / len(e.results)
    alternatives = e.source.recompute.losses_of_wrong_vocabularies(rank, result.microbatch)
    compared = MismatchEvidence(value, result.loss_sum, rank, factors, alternatives=alternatives)
    text = explain(compared, TENSOR_HYPOTHESES)
    where = f" (in {len(wrong)} of {len(e.results)} micro-batches, the first of rank {rank})"
    return text and text + where * (len(wrong) < len(e.results))


def _alternative_losses(results: Sequence[MicroBatchResult]) -> Alternatives:
    by_rank, by_microbatch = _sums_by_rank(results), [(float(r.loss_sum), r.target_count) for r in results]
    total, count = (sum(numbers) for numbers in zip((0.0, 0.0), *by_microbatch, strict=True))
    if not count:
        return
    for owners, sums in (("ranks", by_rank.values()), ("micro-batches", by_microbatch)):
        means = [loss / targets for loss, targets in sums if targets]
        yield f"it is the mean of the means of {owners}, instead of that over all targets", sum(means) / len(means)
    yield "it is the sum of the losses, not divided by the count of targets", total
    for rank, (loss, targets) in by_rank.items():
        if targets:
            yield f"it is that of rank {rank} alone", loss / targets
            yield f"it is the sum over all ranks, divided by the count of rank {rank} alone", total / targets
        yield f"the loss of rank {rank} alone is divided by the count of all", loss / count
        if count > targets:
            yield f"it leaves out rank {rank}", (total - loss) / (count - targets)


def _alternative_counts(e: MismatchEvidence) -> Alternatives:
    results, total = e.results, sum(r.target_count for r in e.results)
    yield "all tokens are counted, instead of the targets alone", float(e.token_count)
    last = {r.rank: r for r in results}.values()
    most = max((r.microbatch for r in last), default=0)
    padding = sum(r.target_count for r in last if r.microbatch < most)
    yield "rows that ranks compute once more, since others have more of them, are counted again", total + padding
    by_rank = {rank: targets for rank, (_, targets) in _sums_by_rank(results).items()}
    subsets = [
        (count, f"rank {' or '.join(str(rank) for rank, targets in by_rank.items() if targets == count)}")
        for count in dict.fromkeys(by_rank.values())
    ]
    for targets, ranks in subsets:
        yield f"it is that of {ranks} alone: the sum over the ranks is missing", targets
    subsets += [(r.target_count, f"micro-batch {r.microbatch} of rank {r.rank}") for r in results]
    for targets, subset in subsets if len(results) > 1 else ():
        yield f"it leaves out that of {subset}", total - targets
        yield f"it has that of {subset} twice", total + targets
    yield "it is the mean over the ranks, instead of the sum", total / max(len(by_rank), 1)
    yield "it is the number of micro-batches", float(len(results))
    for microbatch in sorted({r.microbatch for r in results}):
        counts = [r.target_count for r in results if r.microbatch == microbatch]
        yield f"only micro-batch {microbatch} of each rank is counted", sum(counts)


def _sums_by_rank(results: Sequence[MicroBatchResult]) -> dict[int, tuple[float, float]]:
    """Rank -> sum of losses, count of targets."""
    by_rank = {rank: [r for r in results if r.rank == rank] for rank in dict.fromkeys(r.rank for r in results)}
    return {k: (sum(float(r.loss_sum) for r in own), sum(r.target_count for r in own)) for k, own in by_rank.items()}


def _alternative_squares(squares_by_rank: SquaresByRank, expected_square: float, target_count: float) -> Alternatives:
    yield "it is not divided by the count of target tokens", expected_square * target_count**2
    for rank, squares in enumerate(squares_by_rank):
        local_square = sum(squares.values())
        yield f"it is that of rank {rank} alone: the sum over the ranks is missing", local_square
        yield f"it leaves out that of rank {rank}", expected_square - local_square
        yield f"it has that of rank {rank} twice", expected_square + local_square
    names = sorted({name for squares in squares_by_rank for name in squares})
    largest = {name: max(squares.get(name, 0.0) for squares in squares_by_rank) for name in names}
    sum_of_norms = sum(math.sqrt(square) for square in largest.values())
    yield "it is the sum of the norms of the tensors, not the root of the sum of their squares", sum_of_norms**2
    yield "it is the largest norm of any tensor", max(largest.values(), default=0.0)
    replicated = [name for name in names if len({squares.get(name) for squares in squares_by_rank}) == 1]
    square = expected_square + sum(largest[n] for n in replicated) * (len(squares_by_rank) - 1)
    yield f"{_join_names(replicated)} are counted {len(squares_by_rank)} times, once by each rank", square
    yield "squares of all ranks are added, of replicas too", sum(sum(squares.values()) for squares in squares_by_rank)


def _find_tensor_subset(squares_by_rank: SquaresByRank, excess: float, tolerance: float) -> str:
    """The fewest tensors whose squares, of all ranks or of the rank with most of them, sum to the excess."""
    names = sorted({name for squares in squares_by_rank for name in squares if squares[name]})
    if not names:
        return ""
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
            return _join_names([name for name, is_member in zip(names, smallest, strict=True) if is_member])
    return ""


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "no tensors"
