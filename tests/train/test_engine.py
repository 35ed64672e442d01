"""`motet.parallelize`: a module of one's own, in a loop of one's own."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError, PeerFailedError
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from ranks import Ranks
from refusals import refused
from train.runs import small_job

ROWS = 13
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
    logits, targets = module(rows[:, :-1]), rows[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()


def data(step: int) -> Tensor:
    return torch.randint(0, 13, (ROWS, 5), generator=torch.Generator().manual_seed(step))


def share(group: RankGroup, step: int) -> list[Tensor]:
    """Rank r gets r + 1 rows at a time: three micro-batches for the first of three ranks, two for the others."""
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
    spread, held = engine.optimizer.sharded_parameters, {}
    for name, piece in spread.local_shards(spread.local_masters).items():
        held[name] = torch.zeros(piece.shape.numel(), dtype=torch.float64)
        if name in spread.counted_names:
            held[name][piece.start : piece.start + piece.values.numel()] = piece.values
    return losses, held


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2", "zero=2 shard_group=1"])
def test_uneven_shares_of_the_batch_give_what_one_rank_gives(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    wanted, parameters = ranks.run(1, losses_of, "")[0]
    results = ranks.run(3, losses_of, layout, str(tmp_path / "saved") if layout == "zero=2" else "")
    for losses, _ in results:
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=0)
    whole = layout in ("", "zero=2 shard_group=1")
    for name, parameter in parameters.items():
        found = results[0][1][name] if whole else sum(held[name] for _, held in results)
        torch.testing.assert_close(found, parameter, rtol=1e-12, atol=1e-14)


def by_hand(group: RankGroup) -> float:
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
    refused("no parameter that requires a gradient", motet.parallelize, tower().requires_grad_(False))
    split = tower()
    split.never.to("meta")
    refused(r"several devices \(.* on cpu, never.* on meta\)", motet.parallelize, split)


def named(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleDict({name: nn.Linear(4, 4) for name in names})})


class Odd(nn.Module):
    """Parameters and a buffer that are not contiguous, one parameter of one number and one of none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.randn(4, 4).t(), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("shift", torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.turned @ self.shift @ self.frozen + self.none.sum()
        return self.conv(x[:, :, None, None]).flatten() * self.one


def squares(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def train_odd(group: RankGroup, layout: str) -> list[Tensor]:
    module, sgd = Odd().double(), {"name": "sgd", "learning_rate": 0.01}
    assert not any(t.is_contiguous() for t in (module.turned, module.conv.weight, module.frozen, module.shift))
    engine = motet.parallelize(module, layout, loss=squares, precision="fp64", optimizer=sgd)
    for step in range(3):
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        engine.step(rows.chunk(group.world)[group.rank])
    with engine.consensus_parameters():
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("layout", ["zero=0", "zero=1", "zero=2", "zero=3"])
def test_tensors_need_not_be_contiguous_or_have_elements(ranks: Ranks, layout: str) -> None:
    (wanted,) = ranks.run(1, train_odd, layout)
    for found in ranks.run(2, train_odd, layout):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Given:
    names: tuple[str, ...] = ("a", "b")
    layout: str = "zero=0"
    rate: float = 1e-3
    precision: str | dict[str, str] = "fp32"


def told(group: RankGroup, *ranks: Given) -> str:
    given = ranks[group.rank]
    module, optimizer = named(*given.names), {"learning_rate": given.rate}
    with pytest.raises((InputError, PeerFailedError)) as refusal:
        motet.parallelize(module, given.layout, optimizer=optimizer, precision=given.precision)
    return f"{type(refusal.value).__name__}: {refusal.value}"


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Given(("b", "a")), "rank 1 has parameter layers.b.weight of shape (4, 4), torch.float32, trained, where "),
        (Given(names=("a",)), "rank 1 has nothing more, where rank 0 has parameter layers.b.weight"),
        (Given(rate=0.5), "rank 1 has optimizer.learning_rate = 0.5, where rank 0 has"),
        (Given(layout="zero=1"), "rank 1 has layout.zero = 1, where rank 0 has layout.zero = 0; build the same module"),
        (Given(precision="bf16"), "rank 1 has precision.recipe = 'bf16', where rank 0 has precision.recipe = 'fp32'"),
        (
            Given(precision={"reduce_dtype": "float64"}),
            "rank 1 has precision.reduce_dtype = 'float64', where rank 0 has",
        ),
    ],
)
def test_ranks_that_are_not_alike_are_refused(ranks: Ranks, other: Given, sentence: str) -> None:
    first, second = ranks.run(2, told, Given(), other)
    assert first == "PeerFailedError: another rank has another module or other settings than rank 0; see its error"
    assert second.startswith(f"InputError: {sentence}")


def test_what_cannot_be_trained_is_refused() -> None:
    module = named("a")
    module.z = nn.Parameter(torch.tensor([1 + 2j]))
    refused("parallelize: parameter 'z' is complex; keep its real and imaginary part", motet.parallelize, module)
    refused("parallelize: parameter 'weight' has no shape before a first forward", motet.parallelize, nn.LazyLinear(3))
    with pytest.raises(InputError, match=r"layout\.shard_group = 2 has no effect without layout\.zero"):
        motet.parallelize(named("a"), "zero=0 shard_group=2")
    once = named("a")
    motet.parallelize(once)
    refused("is parallelized already; continue with its engine", motet.parallelize, nn.Sequential(once))


def sparse_at_stage_3(group: RankGroup) -> str:
    with pytest.raises(InputError) as refusal:
        motet.parallelize(nn.ModuleDict({"table": nn.Embedding(6, 4, sparse=True)}), "zero=3")
    return str(refusal.value)


def test_sparse_gradients_cannot_be_cut_into_rows(ranks: Ranks) -> None:
    for said in ranks.run(2, sparse_at_stage_3):
        assert said.startswith("Embedding 'table' has sparse gradients, which layout.zero = 3 cannot cut into rows")


@pytest.mark.parametrize(("made", "precision"), [("float32", "fp64"), ("float64", "fp32"), ("float16", "fp32")])
def test_running_statistics_have_the_dtype_of_what_is_computed(made: str, precision: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(getattr(torch, made))
    engine = motet.parallelize(module, loss=squares, precision=precision)
    assert engine.step(torch.randn(5, 4, dtype=module[0].weight.dtype)).is_finite
    assert module[1].running_mean.dtype == module[0].weight.dtype


def test_running_statistics_in_16_bits_are_refused() -> None:
    with pytest.raises(InputError, match="BatchNorm1d '0' keeps running statistics, which need more than the bfloat16"):
        motet.parallelize(nn.Sequential(nn.BatchNorm1d(4)), precision="bf16")


def test_gradients_from_before_are_dropped_and_trained_buffers_stay_buffers() -> None:
    """A trial backward leaves gradients behind; a buffer may ask for a gradient, and is no parameter."""
    module = tower()
    module.seen.requires_grad_(True)
    loss_sum(module, data(0))[0].backward()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine = motet.parallelize(module, loss=loss_sum, optimizer=OPTIMIZER, precision="fp64")
    clean = motet.parallelize(tower(), loss=loss_sum, optimizer=OPTIMIZER, precision="fp64")
    assert [engine.step(data(i)) for i in range(2)] == [clean.step(data(i)) for i in range(2)]


def test_memory_of_a_run_is_free_after_it(tmp_path: Path) -> None:
    """Python's collector does not see the hooks of a tensor, which must not keep what they belong to."""
    group, job = RankGroup(0, 1, None, torch.device("cpu")), small_job(tmp_path, "layout.microbatches=2")

    def parameters_of_a_run() -> list[ref[torch.Tensor]]:
        parts = build_components(job, group, tmp_path / "run")
        parts.make_train_step(job).step(0, 1e-3)
        return [ref(parameter) for parameter in parts.model.module.parameters()]

    with precision_context(job):
        references = parameters_of_a_run()
    gc.collect()
    assert references and not any(reference() is not None for reference in references)
