"""Each hypothesis finds the cause of tensors that were made wrong in its way."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from motet.parity.diagnose.hypotheses import HYPOTHESES
from motet.parity.diagnose.mismatch_evidence import MicroBatchContribution as Share
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence as Mismatch
from motet.parity.diagnose.mismatch_evidence import OptimizerEvidence
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate as Update
from motet.parity.diagnose.single_device_recompute import MicroBatchResult
from motet.parity.diagnose.tensor_hypotheses import explain
from motet.parity.record.tensor_recorder import TensorKind
from motet.train.optimizer.optimizer_settings import OptimizerSettings

RECOUNTED = "rows that ranks compute once more, since others have more of them, are counted again"
SIZES = {"dp": 4.0, "micro-batches": 2.0, "target tokens": 372.0}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHARES = [Share(rank, part, drawn(30, seed=2 * rank + part), 40.0 + rank) for rank in range(4) for part in range(2)]
TOTAL = torch.stack([share.value for share in SHARES]).sum(0)
BEFORE = {"its value in the step before": drawn(30, seed=99)}
SUM = Mismatch(TOTAL, TOTAL, 1, SIZES, contributions=SHARES, alternatives=BEFORE)


def explained(evidence: Mismatch) -> str:
    return explain(evidence, HYPOTHESES)


def without(rank: int, part: int | None = None) -> Tensor:
    return TOTAL - sum(s.value for s in SHARES if s.rank == rank and part in (None, s.microbatch))


def own(rank: int) -> Tensor:
    return torch.stack([s.value for s in SHARES if s.rank == rank]).sum(0)


def means(case: Mismatch) -> Tensor:
    counts = {rank: sum(s.target_count for s in SHARES if s.rank == rank) for rank in range(4)}
    return torch.stack([s.value / counts[s.rank] for s in SHARES]).sum(0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4 * TOTAL, "it is 4 times what it should be: multiplied by 4 = dp"),
        (TOTAL / 4, "it is 1/4 times what it should be: divided by 4 = dp"),
        (2 * TOTAL, "it is 2 times what it should be: multiplied by 2 = micro-batches"),
        (TOTAL / 372, "divided by 372 = target tokens"),
        (-TOTAL, "it is -1 times what it should be"),
        (0 * TOTAL, "it is 0 throughout"),
        (own(1), "it is the contribution of rank 1 alone: the sum over the ranks is missing"),
        (without(2), "it leaves out the contribution of rank 2"),
        (without(2, 0), "it leaves out the contribution of micro-batch 0 of rank 2"),
        (TOTAL + own(3), "it has the contribution of rank 3 twice"),
        (means(SUM), "contributions of ranks are divided by their own count of targets"),
        (drawn(30, seed=99), "it is its value in the step before"),
        (TOTAL + 0.25 * drawn(30, seed=99), "it has 1/4 times its value in the step before too much"),
        (TOTAL.float().double(), "it was rounded to float32"),
        (TOTAL.bfloat16().double(), "it was rounded to bfloat16"),
        (torch.where(torch.arange(30) == 4, torch.nan, TOTAL), "1 of its 30 elements are not finite"),
        (drawn(30, seed=1234), ""),
    ],
)
def test_what_a_sum_is_made_of(value: Tensor, said: str) -> None:
    found = explained(replace(SUM, value=value))
    assert (said in found) if said else not found, found


def test_what_was_updated_otherwise() -> None:
    before, after = drawn(30, seed=5), drawn(30, seed=6)
    case = Mismatch(before, after, None, SIZES, value_before_step=before)
    assert explained(case) == "it was not updated"
    half = replace(case, value=before + 0.5 * (after - before))
    assert explained(half).startswith("it was updated by 1/2 times what it should be")


@pytest.mark.parametrize("factor", [1.3, 17.0])
def test_of_a_number_not_every_factor_is_a_cause(factor: float) -> None:
    one = torch.tensor(3.0, dtype=torch.float64)
    assert not explained(Mismatch(factor * one, one, 0, SIZES))
    assert "divided by 4 = dp" in explained(Mismatch(one / 4, one, 0, SIZES))
    two = drawn(2)  # one factor for both
    assert "times what it should be" in explained(Mismatch(factor * two, two, 0, SIZES))


NOTHING = torch.zeros(30, dtype=torch.float64)
SPARSE = [share._replace(value=NOTHING) if share.rank == 1 else share for share in SHARES]
SOME = torch.stack([share.value for share in SPARSE]).sum(0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (SOME - own(2), "it leaves out the contribution of rank 2"),
        (2 * SOME, "it is 2 times what it should be"),
        (own(0) + 2 * own(2), "times that of rank"),
    ],
)
def test_shares_that_are_nothing_are_not_named(value: Tensor, said: str) -> None:
    found = explained(replace(SUM, value=value, expected=SOME, contributions=SPARSE))
    assert said in found and not re.search(r"ranks? (0 and )?1\b", found)


BATCH, WHOLE, SQUARE = drawn(8, 5), drawn(100), drawn(26, 32)
REPEATED = torch.cat((torch.ones(5, 5, dtype=torch.float64), drawn(3, 5)))  # Rows of no one place
LATE = torch.cat((NOTHING[:1], WHOLE[60:99]))  # After whatever stood before
NUMBERS = [Share(rank, 0, torch.tensor(value, dtype=torch.float64), 1.0) for rank, value in enumerate([3.0, 5.5, 2.25])]
NUMBER = torch.tensor(10.75, dtype=torch.float64)
OTHER_COLUMN = torch.where(torch.arange(32) == 3, drawn(26, 1, seed=1), SQUARE).flatten()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            replace(SUM, value=TOTAL - own(0) + own(3)),
            "it is made of 0 times that of rank 0, 1 times that of ranks 1 and 2, 2 times that of rank 3",
        ),
        (Mismatch(NOTHING, TOTAL, 0, SIZES, alternatives={"that of pooler.bias": NOTHING}), "it is 0 throughout"),
        (
            Mismatch(BATCH[[0, 1]], BATCH[[2, 3]], 1, SIZES, alternative_rows={"the batch": BATCH}),
            "it is of rows 0 and 1 of the batch",
        ),
        (
            Mismatch(REPEATED[:2], REPEATED[5:7], 1, SIZES, alternative_rows={"the batch": REPEATED}),
            "each of its rows is like rows 0, 1, 2, 3 and 4 of the batch",
        ),
        (Mismatch(NUMBER - 5.5, NUMBER, contributions=NUMBERS), "it leaves out the contribution of rank 1"),
        (Mismatch(LATE, WHOLE[60:], 1, SIZES, source_tensors={"w": WHOLE}), "it is the slice at element 59 of w"),
        (Mismatch(drawn(40, seed=7), WHOLE[60:], 1, SIZES, source_tensors={"w": WHOLE}), ""),
        (Mismatch(OTHER_COLUMN, SQUARE.flatten(), 0, SIZES, source_tensors={"w": SQUARE}), ""),
    ],
)
def test_what_a_tensor_is_instead(case: Mismatch, said: str) -> None:
    assert explained(case) == said


@pytest.mark.parametrize(("lost", "said"), [((2,), "rank 2"), ((0, 1, 2, 3), "micro-batch 1 of ranks 0, 1, 2 and 3")])
def test_of_many_shares_of_few_numbers_one_is_missing(lost: tuple[int, ...], said: str) -> None:
    few = [Share(rank, part, drawn(2, seed=3 * rank + part), 4.0) for rank in range(4) for part in range(3)]
    total = torch.stack([share.value for share in few]).sum(0)
    gone = [s for s in few if s.rank in lost and (len(lost) == 1 or s.microbatch == 1)]
    value = total - torch.stack([share.value for share in gone]).sum(0)
    assert explained(Mismatch(value, total, 0, SIZES, contributions=few)) == f"it leaves out the contribution of {said}"


def test_what_is_as_far_off_as_rounding() -> None:
    expected, noise = drawn(200), drawn(200, seed=1)
    rounded = Mismatch(expected * (1 + 1e-3 * noise), expected, 0, SIZES)
    assert "as much as a computation in bfloat16" in explained(rounded)
    smooth = expected * (1 + 1e-3 * torch.linspace(0.9, 1, 200, dtype=torch.float64))
    assert explained(Mismatch(smooth, expected, 0, SIZES)) == ""
    assert explained(Mismatch(expected[:9] * (1 + 1e-3 * noise[:9]), expected[:9], 0, SIZES)) == ""


def updated(kind: str, wrong: OptimizerSettings, right: OptimizerSettings) -> str:
    moments = {"exp_avg": drawn(30, seed=1), "exp_avg_sq": drawn(30, seed=2).square()}
    moments["momentum_buffer"] = moments["exp_avg"]
    update = Update(right, 1e-3, right.weight_decay, 3.0, drawn(30, seed=3), moments, drawn(30, seed=4))
    other = replace(update, settings=wrong, weight_decay=wrong.weight_decay)
    case = Mismatch(other.expected_state()[kind], update.expected_state()[kind], 0, SIZES)
    evidence = OptimizerEvidence(kind, update, replace(case, contributions=SHARES), {}, {})
    return explained(replace(case, kind="state", optimizer=evidence))


@pytest.mark.parametrize("kind", ["exp_avg", "momentum_buffer"])
def test_a_moment_that_was_updated_with_another_gradient(kind: str) -> None:
    settings = OptimizerSettings(weight_decay=0.0) if kind == "exp_avg" else OptimizerSettings(name="sgd", momentum=0.9)
    moments = {"exp_avg": drawn(30, seed=1), "exp_avg_sq": drawn(30, seed=2).square(), "momentum_buffer": drawn(30)}
    update = Update(settings, 1e-3, 0.0, 3.0, drawn(30, seed=3), moments, TOTAL)
    value = replace(update, gradient=without(2)).expected_state()[kind]
    evidence = OptimizerEvidence(kind, update, SUM, {}, moments)
    case = Mismatch(value, update.expected_state()[kind], 0, SIZES, kind="state", optimizer=evidence)
    words = "the gradient that it was updated with is wrong: it leaves out the contribution of rank 2"
    assert explained(case) == words


def test_small_coefficients_are_not_missing() -> None:
    tiny = OptimizerSettings(weight_decay=1e-5)
    assert updated("master", OptimizerSettings(weight_decay=5e-6), tiny).startswith("weight decay counts 1/2 times")
    assert updated("master", OptimizerSettings(weight_decay=0.0), tiny) == "weight decay is missing"


def test_sgd_and_adam_without_a_first_moment() -> None:
    momentum = OptimizerSettings(name="sgd", momentum=0.9, weight_decay=0.0)
    wrong = momentum.model_copy(update={"momentum": 0.45})
    assert updated("momentum_buffer", wrong, momentum).startswith("its earlier value counts 1/2 times")
    plain = OptimizerSettings(betas=(0.0, 0.95))
    assert "not finite" not in updated("exp_avg", OptimizerSettings(betas=(0.9, 0.95)), plain)


def computed(*targets: list[float]) -> list[MicroBatchResult]:
    """One result per micro-batch; each argument has the target counts of a rank."""
    return [
        MicroBatchResult(rank, part, torch.tensor(1.0), count, {})
        for rank, counts in enumerate(targets)
        for part, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("value", "done", "words"),
    [
        (30.0, computed([10.0], [30.0]), "it is that of rank 1 alone: the sum over the ranks is missing"),
        (20.0, computed([10.0], [10.0], [10.0]), "it leaves out that of rank 0 or 1 or 2"),
        (40.0, computed([10.0], [30.0, 5.0]), "it leaves out that of micro-batch 1 of rank 1"),
        (55.0, computed([10.0], [30.0, 5.0]), RECOUNTED),
        (85.0, computed([10.0], [30.0, 5.0], [15.0]), RECOUNTED),
    ],
)
def test_counts_have_causes(value: float, done: list[MicroBatchResult], words: str) -> None:
    assert scalar_cause("sum", "target tokens", value, sum(each.target_count for each in done), done) == words


def scalar_cause(
    kind: TensorKind, name: str, value: float, expected: float, results: Sequence[MicroBatchResult] = ()
) -> str:
    tensors = [torch.tensor(number, dtype=torch.float64) for number in (value, expected)]
    return explained(Mismatch(*tensors, known_factors=SIZES, kind=kind, name=name, results=results))


def test_numbers_that_are_not_near_were_not_rounded() -> None:
    assert scalar_cause("sum", "mean loss", 344.0, 301.0) == ""
    assert scalar_cause("sum", "mean loss", 302.0, 301.3) == "it has no more bits than bfloat16 has"
