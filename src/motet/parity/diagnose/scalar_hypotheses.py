"""Hypotheses about scalars: losses, counts of targets and the gradient norm."""

import math
from collections.abc import Iterable

import torch

from motet.collectives.compression.byte_messages import dtype_name
from motet.parity.diagnose.contribution_fit import MicroBatchContribution, explain_by_enumeration
from motet.parity.diagnose.linear_fit import (
    TARGET_TOKENS,
    factor_meaning,
    format_factor,
    is_about,
    is_equal_up_to_rounding,
)
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence
from motet.parity.diagnose.scalar_alternatives import (
    alternative_counts,
    alternative_losses,
    alternative_squares,
    find_tensor_subset,
    join_names,
)
from motet.parity.diagnose.tensor_hypotheses import TENSOR_HYPOTHESES, explain
from motet.parity.record.recording_wrappers import TRAINING_MODE_CALLS
from motet.parity.record.tensor_recorder import group_by_key

MEAN_OF_COUNT = {TARGET_TOKENS: "mean loss", "evaluation targets": "evaluation loss"}  # A count, and the mean over it
SCALAR_TOLERANCE = 1e-10


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= SCALAR_TOLERANCE * max(abs(a), abs(b))


def _first_near(value: float, expected: float, alternatives: Iterable[tuple[str, float]]) -> str:
    matches = (words for words, other in alternatives if _is_near(value, other) and not _is_near(other, expected))
    return next(matches, "")


def runs_in_training_mode(e: MismatchEvidence) -> str:
    if e.name != TRAINING_MODE_CALLS:
        return ""
    return f"{float(e.value):g} calls are made in the state of training, where the model is judged"


def is_another_count_or_loss(e: MismatchEvidence) -> str:
    is_count = e.name in MEAN_OF_COUNT
    alternatives = alternative_counts(e.results, e.token_count) if is_count else alternative_losses(e.results)
    return _first_near(float(e.value), float(e.expected), alternatives)


def has_other_losses(e: MismatchEvidence) -> str:
    if e.name in MEAN_OF_COUNT:
        return ""
    losses = [MicroBatchContribution(r.rank, r.microbatch, r.loss_sum, r.target_count) for r in e.results]
    return explain_by_enumeration(e.value * sum(r.target_count for r in e.results), losses, "the loss of ")


def squares_are_multiplied(e: MismatchEvidence) -> str:
    factor = float(e.value) ** 2 / float(e.expected) ** 2 if float(e.expected) else 0.0
    meaning = factor_meaning(factor, e.known_factors)
    if not meaning and (round(factor) <= 1 or not is_about(factor, round(factor))):
        return ""
    return f"squares are counted {format_factor(factor)} times{meaning.removesuffix(': counted twice')}"


def is_another_norm(e: MismatchEvidence) -> str:
    """Compared with the squares of the gradients that each rank has."""
    count, square, expected = e.source.target_count, float(e.value) ** 2, float(e.expected) ** 2
    squares_by_rank = [
        {record.name: record.squared_norm / count**2 for record in records if record.kind == "gradient"}
        for records in e.source.records_by_rank
    ]
    if words := _first_near(square, expected, alternative_squares(squares_by_rank, expected, count)):
        return words
    names = find_tensor_subset(squares_by_rank, square - expected, SCALAR_TOLERANCE * expected)
    if not names:
        return ""
    return f"it lacks {join_names(names)}" if square < expected else f"it has {join_names(names)} twice"


def is_multiplied(e: MismatchEvidence) -> str:
    factor = float(e.value) / float(e.expected) if float(e.expected) else math.nan
    meaning = factor_meaning(factor, e.known_factors)
    return meaning and f"it is {format_factor(factor)} times what it should be{meaning}"


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
    records = e.located.records_by_rank[e.rank or 0]
    mean = next((record.value for record in records if record.name == MEAN_OF_COUNT[e.name]), None)
    losses = [MicroBatchContribution(r.rank, r.microbatch, r.loss_sum, r.target_count) for r in e.results]
    return "" if mean is None else explain_by_enumeration(mean * e.value, losses, "the share of ")


def microbatch_loss_differs(e: MismatchEvidence) -> str:
    """Each micro-batch against the loss that one device has for its rows."""
    expected = {(r.rank, r.microbatch): r for r in e.results}
    wrong = [
        (rank, record.value, result)
        for rank, record in group_by_key(e.source.records_by_rank)[e.source.key]
        if (result := expected.get((rank, record.microbatch))) is not None
        and not is_equal_up_to_rounding(record.value, result.loss_sum)
    ]
    if not wrong:
        return (
            "each micro-batch has the loss that one device has for its rows: the loss depends on how the batch is cut "
            "(one over pairs of rows, say)"
        )
    rank, value, result = wrong[0]
    factors = {**e.known_factors, f"{TARGET_TOKENS} of the micro-batch": result.target_count}
    if e.token_count:
        factors["the count of all its tokens"] = e.token_count / len(e.results)
    text = explain(MismatchEvidence(value, result.loss_sum, rank, factors), TENSOR_HYPOTHESES)
    where = f" (in {len(wrong)} of {len(e.results)} micro-batches, the first of rank {rank})"
    return text and text + where * (len(wrong) < len(e.results))
