"""Error feedback: nothing is lost for good, also by a restart; it converges where plain compression does not."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.byte_messages import decode
from motet.collectives.compression.codec_registry import parse_codec
from motet.collectives.compression.error_feedback import ErrorFeedback, message_seed
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks

TEXTS = [
    *("int8", "int8:rounding=stochastic,levels=quantile", "int4", "int4:levels=quantile", "float8", "sign:block=16"),
    *("topk:keep=0.1", "randomk:keep=0.2,unbiased=false", "powersgd:rank=1"),
]


def gradient(step: int, rank: int = 0) -> Tensor:
    """Multiples of 1/1024, so that float64 adds them and their errors without rounding."""
    draw = torch.Generator().manual_seed(derive_seed(step, rank))
    return torch.randn(12, 10, generator=draw, dtype=torch.float64).mul(1024).round().div(1024)


def exactly(tensors: list[Tensor]) -> list[Fraction]:
    columns = zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
    return [sum(map(Fraction, column), Fraction()) for column in columns]


@pytest.mark.parametrize("text", TEXTS)
def test_sent_plus_last_error_is_given(text: str) -> None:
    feedback, sent = ErrorFeedback(parse_codec(text), seed=1), []
    for step in range(6):
        message = feedback.encode("w", gradient(step), step)
        sent.append(decode(parse_codec(text), message, (12, 10), torch.float64, message_seed(1, "w", step)))
    assert feedback.errors["w"].abs().max() > 0
    assert exactly([*sent, feedback.errors["w"]]) == exactly([gradient(step) for step in range(6)])


def all_reduces(group: RankGroup, text: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    feedback = ErrorFeedback(parse_codec(text), seed=1)
    given = [gradient(step, group.rank).to(dtype) for step in range(5)]
    totals = [feedback.all_reduce("w", tensor, group, step).clone().double() for step, tensor in enumerate(given)]
    return totals, feedback.errors["w"].double()


@pytest.mark.parametrize("text", [*TEXTS, "topk:keep=0.9"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_over_ranks_totals_plus_last_errors_are_given(ranks: Ranks, text: str, dtype: torch.dtype) -> None:
    results = ranks.run(3, all_reduces, text, dtype)
    totals = results[0][0]
    arrived = torch.stack([*totals, *(error for _, error in results)]).sum(0)
    given = torch.stack([gradient(step, rank).to(dtype).double() for step in range(5) for rank in range(3)]).sum(0)
    # A dense or low-rank total is rounded to its dtype, which no rank can give again; all else is fed back.
    rounds = dtype == torch.bfloat16 and parse_codec(text).name in ("topk", "randomk", "powersgd")
    torch.testing.assert_close(arrived, given, rtol=0.0, atol=0.2 if rounds else 2e-5)
    for other, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(other, totals, strict=True))


def resumed(group: RankGroup, text: str) -> bool:
    whole, first, second = (ErrorFeedback(parse_codec(text), seed=1) for _ in range(3))

    def totals(feedback: ErrorFeedback, *steps: int) -> list[Tensor]:
        return [feedback.all_reduce("w", gradient(step, group.rank).float(), group, step) for step in steps]

    expected = totals(whole, *range(6))
    totals(first, 0, 1, 2)
    second.load_state_dict(first.state_dict())
    totals(first, 3)  # the two share no errors from here on
    return all(torch.equal(a, b) for a, b in zip(totals(second, 3, 4, 5), expected[3:], strict=True))


@pytest.mark.parametrize("text", ["sign:block=16", "topk:keep=0.1", "int4:rounding=stochastic", "powersgd:rank=1"])
def test_a_resumed_run_goes_on_with_the_same_bits(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, resumed, text) == [True, True]


def test_draws_follow_from_seed_step_and_name_and_the_state_has_plain_names() -> None:
    def message(seed: int, step: int, name: str) -> Tensor:
        return ErrorFeedback(parse_codec("int4:rounding=stochastic"), seed).encode(name, gradient(0), step)

    assert torch.equal(message(1, 2, "w"), message(1, 2, "w"))
    for other in ((2, 2, "w"), (1, 3, "w"), (1, 2, "v")):
        assert not torch.equal(message(1, 2, "w"), message(*other))
    feedback = ErrorFeedback(parse_codec("sign"), seed=1)
    feedback.encode("layers/0.w", gradient(0), 0)
    assert list(feedback.state_dict()) == ["error/layers/0.w"]
    other = ErrorFeedback(parse_codec("sign"), seed=1)
    other.load_state_dict(feedback.state_dict())
    assert torch.equal(other.errors["layers/0.w"], feedback.errors["layers/0.w"])


def after_a_bad_step(group: RankGroup, text: str) -> tuple[bool, bool]:
    feedback = ErrorFeedback(parse_codec(text), seed=1)
    feedback.all_reduce("w", gradient(0, group.rank), group, 0)
    before = {name: tensor.clone() for name, tensor in feedback.state_dict().items()}
    bad = gradient(1, group.rank)
    if group.rank == 0:
        bad[3, 3] = float("inf")
    told = not feedback.all_reduce("w", bad, group, 1).isfinite().all()
    after = feedback.state_dict()
    return told, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("text", TEXTS)
def test_a_step_that_is_not_finite_leaves_the_errors_alone(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, after_a_bad_step, text) == [(True, True)] * 2


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InputError, match=r"compression randomk:keep=0\.1,unbiased=true: .* use unbiased=false"):
        ErrorFeedback(parse_codec("randomk:keep=0.1"), seed=0)
    feedback = ErrorFeedback(parse_codec("sign"), seed=0)
    feedback.encode("w", torch.zeros(3), 0)
    with pytest.raises(InputError, match=r"the error of 'w' has shape \[3\], its tensor \[4\]; start with no errors"):
        feedback.encode("w", torch.zeros(4), 1)
    with pytest.raises(InputError, match="'momentum/w' is neither an error/ nor a basis/ of a tensor"):
        feedback.load_state_dict({"momentum/w": torch.zeros(3)})


def regression(group: RankGroup, text: str, feed_back: bool) -> float:
    """Least squares by gradient descent; each rank has rows of its own, and large gradients that cancel."""
    draw = torch.Generator().manual_seed(0)
    inputs, solution = torch.randn(group.world, 40, 20, generator=draw), torch.randn(20, generator=draw)
    mine, targets = inputs[group.rank], inputs[group.rank] @ solution
    cancelling = torch.zeros(20)
    cancelling[:10] = 5.0 * (-1) ** group.rank
    weights, feedback = torch.zeros(20), ErrorFeedback(parse_codec(text), seed=1)
    for step in range(300):
        grad = mine.T @ (mine @ weights - targets) / len(mine) + cancelling
        if feed_back:
            total = feedback.all_reduce("w", grad, group, step)
        else:
            total = compressed_collectives.all_reduce(grad, parse_codec(text), group, derive_seed(1, step, "w")).total
        weights -= 0.1 / (1 + step / 50) * total / group.world
    return ((weights - solution).norm() / solution.norm()).item()


@pytest.mark.parametrize("text", ["sign", "topk:keep=0.1"])
def test_it_converges_where_plain_compression_does_not(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, regression, text, True)[0] < 0.1 and ranks.run(2, regression, text, False)[0] > 0.5
