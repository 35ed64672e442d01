"""`motet.parallelize` on modules that are not alike on all ranks, or of an unusual kind."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError, PeerFailedError
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks


def named(*names: str) -> nn.ModuleDict:
    """Layers in the order of these names."""
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
    """The parameters after three steps; each rank has its part of four rows."""
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
    """The arguments of one rank."""

    names: tuple[str, ...] = ("a", "b")
    layout: str = "zero=0"
    rate: float = 1e-3
    precision: str = "fp32"


def told(group: RankGroup, *ranks: Given) -> str:
    """The message that each of these ranks raises."""
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
        (Given(precision="bf16"), "rank 1 has precision = 'bf16', where rank 0 has precision = 'fp32'"),
    ],
)
def test_ranks_that_are_not_alike_are_refused(ranks: Ranks, other: Given, sentence: str) -> None:
    first, second = ranks.run(2, told, Given(), other)
    assert first == "PeerFailedError: another rank has not the module or the settings of rank 0, and says which"
    assert second.startswith(f"InputError: {sentence}")


def test_what_cannot_be_trained_is_refused() -> None:
    module = named("a")
    module.z = nn.Parameter(torch.tensor([1 + 2j]))
    with pytest.raises(InputError, match="parallelize: parameter 'z' is complex; keep its real and imaginary part"):
        motet.parallelize(module)
    with pytest.raises(InputError, match="parallelize: parameter 'weight' has no shape before a first forward"):
        motet.parallelize(nn.LazyLinear(3))
    with pytest.raises(InputError, match=r"layout\.shard_group = 2 has no effect without layout\.zero"):
        motet.parallelize(named("a"), "zero=0 shard_group=2")
    once = named("a")
    motet.parallelize(once)
    with pytest.raises(InputError, match="is parallelized already; go on with the engine that it has"):
        motet.parallelize(nn.Sequential(once))


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
