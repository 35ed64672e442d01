"""`motet.verify` on modules and parallel code of the caller; the guide to silent bugs is executed."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import motet
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.parity.rank_threads import fork_rank_pool
from refusals import refused

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "silent-bugs.md"


def test_the_guide_to_silent_bugs_is_true() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    for kind, text in blocks:
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(PAGE), "exec"), names)
            continue
        assert re.sub(r" \(\d+\.\d s\)", "", printed.getvalue()) == text
        printed = io.StringIO()
    assert len(blocks) == 7


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def test_layouts_of_a_module() -> None:
    report = motet.verify(model, ["zero=1", "dp=3 zero=2 microbatches=2"], batch, loss=loss)
    assert report.ok, report
    assert [verdict.layout for verdict in report.verdicts] == ["zero=1", "dp=3 zero=2 microbatches=2"]
    assert all(0 < verdict.worst_relative < 1e-13 for verdict in report.verdicts)
    assert report.as_json()["layouts"][0]["ok"] is True


class Batchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x - x.mean(0))
        return found


def test_rows_that_depend_on_each_other_are_told() -> None:
    report = motet.verify(Batchy, ["zero=1"], batch, loss=loss)
    assert not report.ok and report.verdicts[0].first_difference == "activation inner, step 1"
    assert "its rows depend on the other rows" in (report.verdicts[0].cause or "")


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Recomputing(nn.Module):
    """A block with dropout is computed again in backward. Rank 1 scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList([Dropping(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.blocks[0], self.first(x), use_reentrant=True)
        return found * (1.001 if dist.is_initialized() and dist.get_rank() == 1 else 1.0)


def test_the_cause_is_found_in_a_module_that_recomputes_blocks() -> None:
    (verdict,) = motet.verify(Recomputing, ["zero=1"], batch, loss=loss).verdicts
    assert verdict.first_difference == "activation whole model, step 1"
    assert verdict.cause == "it is 1.001 times what it should be, on rank 1 alone"


@pytest.mark.parametrize(
    ("layouts", "batches", "said"),
    [
        (["dp=5"], batch, "data.batch_sequences = 12 cannot be cut evenly over 5 ranks"),
        (["dp=2 data=parameter_server"], batch, "motet.verify starts no server processes"),
        ([], batch, "layouts = []; give a list of at least one"),
        ("zero=1", batch, "layouts = 'zero=1'; give a list"),
        (["zero=1"], lambda step: (torch.zeros(3, 2), torch.zeros(4)), "have {'0': 3, '1': 4} rows"),
        (["zero=1"], lambda step: (torch.zeros(4, 2), [1, 2, 3, 4]), "1 of a batch is a list; give tensors"),
        (["zero=1"], lambda step: 3, "a batch is a int; give a tensor"),
        (["zero=1"], lambda step: (torch.zeros(4 + step, 6), torch.zeros(4 + step, 3)), "batch 1 has 5 rows"),
        ([lambda module: lambda rows: {"loss": 1.0}], batch, "the module has dropout, whose masks your function draws"),
    ],
)
def test_what_cannot_be_verified(layouts: Any, batches: Any, said: str) -> None:
    refused(re.escape(said), motet.verify, model, layouts, batches, loss=loss)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grads": torch.zeros(1)}, "your step returns 'grads'"),
        ({}, "your step returns nothing"),
        ({"gradient.inner.weights": torch.zeros(1)}, "has no gradient inner.weights; there are inner."),
        ({"gradient.inner.weight": None}, "your step returns gradient.inner.weight = None"),
    ],
)
def test_what_own_steps_may_not_give(given: Any, said: str) -> None:
    refused(re.escape(said), motet.verify, Batchy, [lambda module: lambda rows: given], batch, loss=loss)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda module, batch: module(batch[0]), "verify: the loss is of shape [12, 3]"),
        (
            lambda module, batch: (module(batch[0]).sum(), batch[0]),
            "the count that goes with the loss is of shape [12, 6]",
        ),
        (lambda module, batch: module(batch[0]).detach().sum(), "the loss depends on no parameter"),
    ],
)
def test_what_a_loss_may_not_be(wrong: Any, said: str) -> None:
    refused(re.escape(said), motet.verify, model, ["zero=1"], batch, loss=wrong)


def test_a_module_that_is_given_twice() -> None:
    same = model()
    refused("model_fn returns the same module again", motet.verify, lambda: same, ["zero=1"], batch, loss=loss)


def test_batches_that_are_others_when_asked_for_again() -> None:
    def unseeded(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)

    generator = torch.Generator()
    report = motet.verify(model, ["zero=1"], unseeded, loss=loss)
    assert not report.ok
    assert "it gets other samples for the same step" in (report.verdicts[0].cause or "")


class Odd(nn.Module):
    """Unusual parts: a mask of infinities, integer buffers, a module that is called for each row, one whose rows are
    the second dimension, and one with empty output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.each = nn.Linear(8, 8)
        self.mask, self.nothing = Mask(), Nothing()
        self.recurrent = nn.GRU(8, 8)
        self.output = nn.Linear(8, 3)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("used", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.stack([self.each(row) for row in self.embed(x)])
        hidden = self.recurrent(torch.stack([hidden, hidden]))[0][-1] + self.nothing(hidden).sum()
        found: Tensor = self.output(torch.softmax(hidden + self.mask(hidden), -1))
        return found


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).masked_fill(torch.arange(x.shape[1]) > 5, -torch.inf)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:0]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_batch_may_have_other_names() -> None:
    def own(module: nn.Module, given: Pair) -> Tensor:
        return loss(module, (given.x, given.y))

    report = motet.verify(lambda: nn.Linear(6, 3), ["zero=1"], lambda step: Pair(*batch(step)), loss=own)
    assert report.ok, report


def test_unusual_modules_are_no_difference() -> None:
    assert (report := motet.verify(Odd, ["zero=1", "zero=3"], batch, loss=loss)).ok, report


def test_batch_norm_is_told() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))

    report = motet.verify(normed, ["zero=1"], batch, loss=loss)
    assert report.verdicts[0].first_difference == "activation 1, step 1"
    assert "its rows depend on the other rows" in (report.verdicts[0].cause or "")


def test_ranks_that_are_forked_have_one_thread_each() -> None:
    def tell(group: RankGroup) -> None:
        raise InputError(f"rank {group.rank} has {torch.get_num_threads()} thread")

    with fork_rank_pool(2, {"tell": tell}) as pool, pytest.raises(InputError, match=r"^rank \d has 1 thread$"):
        pool.run(2, "tell")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Residual() for _ in range(2)]), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.proof
def test_a_pipeline_and_layouts_that_do_not_end_the_others() -> None:
    layouts = ["tp=5 zero=9", "dp=1 pp=3 microbatches=3", "pp=2 microbatches=2", "dp=2 zero=1"]
    report = motet.verify(Blocks, layouts, batch, loss=loss)
    assert [(verdict.ok, verdict.failed) for verdict in report.verdicts] == [(False, True)] * 2 + [(True, False)] * 2
    assert "Blocks" in (report.verdicts[1].cause or "")


def half_the_rate(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    def step(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss(module, batch).backward()
        optimizer.step()
        return {f"parameter.{name}": parameter.detach() for name, parameter in module.named_parameters()}

    return step


@pytest.mark.proof
def test_own_steps_that_give_parameters_alone_hear_what_to_give() -> None:
    sgd = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    (verdict,) = motet.verify(Blocks, [half_the_rate], batch, loss=loss, optimizer=sgd).verdicts
    assert not verdict.ok and (verdict.first_difference or "").startswith("parameter ")
    assert "return gradient.NAME for each parameter too" in (verdict.cause or ""), verdict
    assert "gradients are right" not in (verdict.cause or "")
