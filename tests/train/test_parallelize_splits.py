"""Modules whose layers ranks split in a custom loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet import parallelize
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.precision.float64_mode import use_float64
from ranks import RankFailureError, Ranks

WIDTH, WORDS, STEPS = 16, 30, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return output


class _Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.blocks, self.head = nn.ModuleList([_Block(), _Block()]), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.table(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batch_of(step: int, rank: int, ranks: int) -> dict[str, Tensor]:
    tokens = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[rank::ranks, :-1], "targets": tokens[rank::ranks, 1:]}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = module(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()


def train(group: RankGroup, layout: str) -> tuple[list[float], list[float]]:
    with use_float64():
        example = batch_of(0, 0, 2)
        engine = parallelize(
            _Model().double(), layout, loss=loss, example=example, precision="fp64", optimizer={"learning_rate": 0.01}
        )
        steps = [engine.step(batch_of(step, engine.data_rank, engine.data_ranks)) for step in range(STEPS)]
        if group.world > 1:
            assert any(rule.splits for rule in engine.plan.model_sharding.rules.values())
        return [step.loss for step in steps], [step.grad_norm for step in steps]


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true", "tp=2 dp=2 zero=2"])
def test_a_module_of_another_is_split_and_trains_as_on_one_device(ranks: Ranks, layout: str) -> None:
    (alone,) = ranks.run(1, train, "")
    for losses, norms in ranks.run(4 if "dp" in layout else 2, train, layout):
        assert losses == pytest.approx(alone[0], rel=1e-12) and norms == pytest.approx(alone[1], rel=1e-12)


def split_with_float_inputs(group: RankGroup) -> float:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, dtype=torch.long)}

    def mean_loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(module(batch["x"]), batch["y"])

    layout = f"tp={group.world}" if group.world > 1 else ""
    return parallelize(module, layout, loss=mean_loss, example=batch, precision="fp32").step(batch).loss


@pytest.mark.proof
def test_inputs_that_are_not_tokens_are_run_in_the_dtype_of_the_proof(ranks: Ranks) -> None:
    (alone,) = ranks.run(1, split_with_float_inputs)
    assert ranks.run(2, split_with_float_inputs) == pytest.approx([alone, alone], rel=1e-6)


def refused(group: RankGroup, case: str) -> None:
    batch, options = batch_of(0, 0, 1), dict[str, Any](loss=loss)
    if case == "no example":
        parallelize(_Model(), "tp=2", **options)
    if case == "wrong example":
        parallelize(_Model(), "tp=2", **options, example=batch["tokens"])
    if case == "dropout":
        parallelize(_Model(0.1), "tp=2", **options, example=batch)
    if case == "other batches":
        parallelize(_Model(), "tp=2", **options, example=batch).step(batch_of(group.rank, 0, 1))


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            "no example",
            r"layout.tp = 2 splits layers, rows or blocks, and each split is proven by running .*; give .* example=",
        ),
        ("wrong example", r"the loss fails on example=... with IndexError: .*; give a batch as a step gets it"),
        ("dropout", r"_Model has dropout, which in a custom loop is PyTorch's: .*; set it to 0, or train"),
        ("other batches", r"ranks that split layers of one model have losses from .* to .*; give ranks with the same"),
    ],
)
def test_what_cannot_be_split_is_refused(ranks: Ranks, case: str, sentence: str) -> None:
    with pytest.raises((RankFailureError, InputError), match=sentence):
        ranks.run(2, refused, case)
