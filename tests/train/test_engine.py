"""`motet.parallelize`: a module of one's own, in a loop of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks

ROWS = 11
OPTIMIZER = {"learning_rate": 0.01, "clip_norm": 0.5}


class Tower(nn.Module):
    """A table that is used twice, a frozen part, a part that is never called, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Linear(6, 2)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.table(tokens))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tower() -> Tower:
    torch.manual_seed(3)
    return Tower().double()


def loss_sum(module: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    logits = module(rows[:, :-1])
    targets = rows[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def data(step: int) -> Tensor:
    return torch.randint(0, 13, (ROWS, 5), generator=torch.Generator().manual_seed(step))


def share(group: RankGroup, step: int) -> list[Tensor]:
    """Rank r gets r + 1 rows at a time; the last ranks run out of them first."""
    rest = data(step)
    found: list[Tensor] = []
    while len(rest):
        for rank in range(group.world):
            portion, rest = rest[: rank + 1], rest[rank + 1 :]
            if rank == group.rank and len(portion):
                found.append(portion)
    return found


def losses_of(group: RankGroup, layout: str, folder: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """Four steps; with a folder, the last two by a fresh engine from the checkpoint of the second."""
    engine = motet.parallelize(tower(), layout, loss=loss_sum, optimizer=OPTIMIZER, precision="fp64")
    losses = []
    for step in range(4):
        if folder and step == 2:
            engine.save(folder, step)
            engine = motet.parallelize(tower(), layout, loss=loss_sum, optimizer=OPTIMIZER, precision="fp64")
            assert engine.restore(folder) == 2
        update = engine.step(*share(group, step))
        assert update.is_finite and update.count == ROWS * 4
        losses += [update.loss, update.grad_norm]
    spread = engine.optimizer.sharded_parameters
    held = {}
    for name, piece in spread.local_shards(spread.local_masters).items():
        held[name] = torch.zeros(piece.shape.numel(), dtype=torch.float64)
        if spread.mesh.contributes_to_norm:
            held[name][piece.start : piece.start + piece.values.numel()] = piece.values
    return losses, held


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2", "zero=2 shard_group=1"])
def test_uneven_shares_of_the_batch_give_what_one_rank_gives(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    wanted, parameters = ranks.run(1, losses_of, "")[0]
    folder = str(tmp_path / "saved") if layout == "zero=2" else ""
    results = ranks.run(3, losses_of, layout, folder)
    for losses, _ in results:
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=0)
    whole = layout in ("", "zero=2 shard_group=1")
    for name, parameter in parameters.items():
        found = results[0][1][name] if whole else sum(held[name] for _, held in results)
        torch.testing.assert_close(found, parameter, rtol=1e-12, atol=1e-14)


def by_hand(group: RankGroup) -> float:
    """The loop of the guide, with torch's optimizer beside it."""
    ours, theirs = tower(), tower()
    engine = motet.parallelize(ours, "zero=1", optimizer={**OPTIMIZER, "weight_decay": 0.0}, precision="fp64")
    trained = [p for p in theirs.parameters() if p.requires_grad]
    torch_adamw = torch.optim.AdamW(trained, 0.01, (0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        engine.begin_step()
        value, count = loss_sum(ours, data(step)[group.rank :: group.world])
        engine.backward(value)
        engine.update(0.01, value.item(), count)
        (loss_sum(theirs, data(step))[0] / (ROWS * 4)).backward()
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        for p in trained:
            p.grad = None if p.grad is None else p.grad * min(1.0, 0.5 / norm.item())
        torch_adamw.step()
        torch_adamw.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_the_parts_of_a_step_by_hand(ranks: Ranks) -> None:
    assert max(ranks.run(2, by_hand)) < 1e-12


def uneven_at_stage_3(group: RankGroup) -> str:
    engine = motet.parallelize(tower(), "zero=3", loss=loss_sum, precision="fp64")
    engine.step(data(0))
    with pytest.raises(InputError) as refusal:
        engine.step(*[data(1)] * (1 + group.rank))
    return str(refusal.value)


def test_at_stage_3_ranks_have_equally_many_micro_batches(ranks: Ranks) -> None:
    for said in ranks.run(2, uneven_at_stage_3):
        assert said.startswith("step: a rank has 1 micro-batches and another 2; at stage 3")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layout": "zero=5"}, "layout 'zero=5': zero = 5 must be at most"),
        ({"layout": "zero"}, "'zero' is not of the form key=value"),
        ({"layout": "zeros=1"}, "unknown key 'zeros'; did you mean 'zero'"),
        ({"layout": "dp=2"}, "dp = 2 does not match 1 ranks"),
        ({"optimizer": {"lr": 1.0}}, "optimizer: unknown key 'lr'"),
        ({"optimizer": {"schedule": {"kind": "constant"}}}, "schedule has no effect in a custom loop"),
        ({}, "there is no loss"),
        ({"loss": lambda module, x: 1.0}, "the loss is a float; give a tensor of one number"),
        ({"loss": lambda module, x: module(x).square()}, r"the loss is of shape \[.*\]; give a tensor of one"),
        ({"loss": lambda module, x: module(x).sum().detach()}, "the loss depends on no parameter that is trained"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        motet.parallelize(tower(), **{"precision": "fp64", **settings}).step(data(0))


def test_modules_that_are_refused() -> None:
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        motet.parallelize(tower().requires_grad_(False))
    split = tower()
    split.never.to("meta")
    with pytest.raises(InputError, match=r"several devices \(.* on cpu, never.* on meta\)"):
        motet.parallelize(split)
