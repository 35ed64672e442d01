"""Every stage of ZeRO computes what one rank computes, sends what the textbook says, and reads every checkpoint."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import motet
from environment import needs_torch_2_13
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.precision.recipe import RECIPES
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.state import newest_checkpoint
from parallel.plans import inventory_of_shapes, optimizer_of, plan_of
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job, train, worst_difference

Case = tuple[Any, ...]  # Ranks, layout, other settings
SMALL = ("communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001")
AHEAD = "communication.overlap=forward"


def named(**algorithms: str) -> list[str]:
    return [f"communication.{collective}={name}" for collective, name in algorithms.items()]


BUCKETED: list[Case] = [
    (2, "zero=1"),
    (3, "zero=2 microbatches=3", *SMALL),
    (2, "zero=1 microbatches=3", *SMALL),
    (2, "zero=2 microbatches=3"),
    (4, "zero=1 shard_group=2"),
    (4, "zero=2 shard_group=2 microbatches=3", *SMALL),
    (3, "zero=0", *SMALL),
    (2, "zero=0 microbatches=3", "communication.overlap=none"),
    (1, "zero=2 microbatches=3"),
    (3, "zero=0 microbatches=3", *SMALL, AHEAD),
    (2, "zero=1", *SMALL, AHEAD),
    (4, "zero=2 shard_group=2 microbatches=3", *SMALL, AHEAD),
    (4, "zero=1 shard_group=2", *named(all_reduce="tree", reduce_scatter="bruck", all_gather="bruck")),
]
HYBRID = "zero=3 shard_group=2 microbatches=3"
ROWS: list[Case] = [
    (1, "zero=3"),
    (2, "zero=3 microbatches=3"),
    (3, "zero=3 reshard_after_forward=false microbatches=3"),
    (
        *(4, f"{HYBRID} min_shard_numel=100"),
        *named(all_gather="ring", reduce_scatter="direct", all_reduce="recursive-doubling"),
    ),
]
BATCH = "data.batch_sequences=36"
HARD = "model={factory='parallel.sharded_models:Hard'}"
UNUSED = needs_torch_2_13("FSDP2 reduces no gradient of a parameter that a rank has not used")


def job_of(folder: Path, layout: str, *changes: str, model: str = "decoder") -> Job:
    return small_job(folder, *changes, *(f"layout.{word}" for word in layout.split()), model=model)


def agree(ranks: Ranks, folder: Path, model: str, changes: list[str], cases: list[Case], most_steps: int = 10) -> None:
    """Every rank of each case has the numbers of one rank alone."""
    steps = None if model == "classify" else most_steps  # all that there are where its samples are fewer
    alone = ranks.run(1, train, job_of(folder, "", *changes, model=model), steps, timeout_s=240)[0]
    assert min(alone.norms) > 1e-3
    for world, layout, *settings in cases:
        job = job_of(folder, layout, *changes, *settings, model=model)
        for rank, trained in enumerate(ranks.run(world, train, job, steps, timeout_s=240)):
            worst = worst_difference(trained, alone)
            assert worst < 1e-12, f"{model} {world} ranks {layout} {settings}, rank {rank}: {worst:.2e}"


@pytest.mark.parametrize(
    ("model", "changes", "cases"),
    [
        ("decoder", [BATCH], BUCKETED[:7]),
        pytest.param("decoder", [BATCH], BUCKETED[7:], marks=pytest.mark.proof),
        pytest.param("bert", [BATCH], [BUCKETED[9], BUCKETED[11]], marks=pytest.mark.proof),
        pytest.param("adapters", [BATCH], [BUCKETED[1], BUCKETED[9]], marks=pytest.mark.proof),
        ("decoder", [BATCH], ROWS),
        ("t5", [], [(2, "zero=3")]),
        *(pytest.param(model, [], [(2, "zero=3")], marks=pytest.mark.proof) for model in ("bert", "gpt2", "adapters")),
        ("decoder", ["model.tied=false", "model.frozen=['embedding*', 'blocks*', 'norm*']"], [(2, "zero=3")]),
        pytest.param("decoder", [BATCH, HARD], [(3, "zero=3 microbatches=3"), (4, HYBRID)], marks=UNUSED),
    ],
)
def test_each_stage_computes_what_one_rank_computes(
    ranks: Ranks, tmp_path: Path, model: str, changes: list[str], cases: list[Case]
) -> None:
    agree(ranks, tmp_path, model, changes, cases, most_steps=5)


@pytest.mark.proof
@pytest.mark.parametrize("model", ["decoder", "bert", "t5", "classify", "llama", "qwen2", "gpt2", "adapters"])
def test_every_stage_on_every_world(ranks: Ranks, tmp_path: Path, model: str) -> None:
    cases: list[Case] = []
    for world in (1, 2, 3, 4):
        parts = [f"microbatches={count}" for count in (1, 3)]
        for zero, part, sizes, overlap in product((0, 1, 2), parts, ((), SMALL), ("forward", "backward", "none")):
            cases.append((world, f"zero={zero} {part}", f"communication.overlap={overlap}", *sizes))
        for group, reshards, part in product(("", "shard_group=2")[: 1 + (world == 4)], ("true", "false"), parts):
            cases.append((world, f"zero=3 {group} reshard_after_forward={reshards} {part}"))
    cases += [(4, f"zero={zero} shard_group=2 microbatches={count}") for zero in (1, 2) for count in (1, 3)]
    agree(ranks, tmp_path, model, [BATCH], cases)


def test_the_textbook_holds_where_everything_divides() -> None:
    """N ranks, P parameters, gradients of g and parameters of p bytes: 2gP, (g + p)P or (g + 2p)P, x (N - 1) / N."""
    inventory = inventory_of_shapes({f"w{i}": (64, 64) for i in range(6)}, blocks={f"w{i}": i // 2 for i in range(6)})
    settings = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring", bucket_mib=1 / 32)
    for world, (zero, bytes_each) in product((2, 4, 8), ((0, 2 * 4), (1, 4 + 2), (2, 4 + 2), (3, 4 + 2 + 2))):
        plan = plan_of(inventory, DataParallelSharding(world, 1, zero, world if zero else 1), "bf16", settings)
        for rank in range(world):
            sent = sent_bytes_per_step(plan, RECIPES["bf16"], settings=settings, rank=rank)
            assert sent.total * world == bytes_each * 6 * 4096 * (world - 1)


class Branches(nn.Module):
    """Which of the two is used depends on the rank; the third never is."""

    def __init__(self) -> None:
        super().__init__()
        self.either, self.other, self.never = (nn.Linear(5, 5) for _ in range(3))
        self.shared = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        used = self.other if which else self.either
        return self.shared(used(x) + used(x).relu()).sum()


def branches(group: RankGroup, zero: int, parts: int) -> dict[str, torch.Tensor]:
    """Gradients summed over ranks whose backward had different parameters."""
    torch.manual_seed(0)
    module = Branches().double()
    layout = resolve_layout(LayoutSettings(zero=zero, microbatches=parts), group.world, group.world * parts)
    settings = CommunicationSettings(bucket_mib=1e-4, first_bucket_mib=1e-4)
    sgd = OptimizerSettings(name="sgd")
    updater = optimizer_of(module, layout.sharding, group, settings=sgd, recipe="fp64", communication=settings)
    for _ in range(2):  # nothing is left over from the step before
        updater.sharded_parameters.begin_step()
        for part in range(parts):
            updater.sharded_parameters.begin_backward(part == 0, part == parts - 1)
            module(inputs(group.rank, part), (group.rank + part) % 2).backward()
            updater.sharded_parameters.end_backward()
    flat = {name: torch.zeros(piece.shape.numel(), dtype=torch.float64) for name, piece in found(updater).items()}
    for name, piece in found(updater).items():
        if name in updater.sharded_parameters.counted_names:
            flat[name][piece.start : piece.start + piece.values.numel()] = piece.values
        if group.process_group is not None and zero:
            dist.all_reduce(flat[name], group=group.process_group)
    return flat


def found(updater: ShardedOptimizer) -> dict[str, Any]:
    return updater.sharded_parameters.local_shards(updater.sharded_parameters.local_gradients())


def inputs(rank: int, part: int) -> torch.Tensor:
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + part))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_may_use_other_parameters_than_their_peers(ranks: Ranks, zero: int, parts: int) -> None:
    torch.manual_seed(0)
    alone = Branches().double()
    for rank, part in product(range(3), range(parts)):
        alone(inputs(rank, part), (rank + part) % 2).backward()
    got = ranks.run(3, branches, zero, parts)[0]
    for name, parameter in alone.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got[name], wanted.flatten(), rtol=1e-12, atol=1e-12)
    assert got["never.weight"].abs().max() == 0 < got["either.weight"].abs().max()


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2 microbatches=2"])
def test_a_gradient_that_comes_without_a_hook_is_refused(layout: str) -> None:
    """Torch's backward for the weights alone fires no hooks; such a step had a norm of 0 and was finite."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine, x = motet.parallelize(module, layout), torch.randn(2, 4, requires_grad=True)
    engine.begin_step()
    first = x.clone()
    first.register_hook(lambda gradient: setattr(module[2].bias, "grad", torch.ones(4)))
    with pytest.raises(InputError, match=r"^parameter 2\.bias got a gradient past its hook, which would be lost"):
        engine.backward(module(first).sum(), last="micro" not in layout)
    module[2].bias.grad = None
    parameters = engine.optimizer.sharded_parameters
    parameters.begin_backward(is_first=True, is_last="micro" not in layout)
    output = module(x)
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    with pytest.raises(InputError, match=r"^parameter 0\.weight got a gradient past its hook, .*split backward"):
        parameters.end_backward()


class Capturing(nn.Module):
    """Keeps the parameter that its forward computes with, which stage 3 gathers for this forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.used: list[nn.Parameter] = []
        self.blocks[1].register_forward_pre_hook(lambda block, _: self.used.append(block.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x).tanh())


def late_gradient(group: RankGroup, is_planted: bool) -> str:
    module = Capturing()
    engine, x = motet.parallelize(module, "zero=3"), torch.randn(2, 4, requires_grad=True)
    engine.begin_step()
    first = x.clone()
    if is_planted:
        first.register_hook(lambda gradient: setattr(module.used[0], "grad", torch.ones(4, 4)))
    try:
        engine.backward(module(first).sum())
    except InputError as error:
        return str(error)
    return ""


def test_a_gradient_that_comes_after_the_backward_of_a_block_is_refused(ranks: Ranks) -> None:
    assert ranks.run(2, late_gradient, False) == ["", ""]
    for sentence in ranks.run(2, late_gradient, True):
        assert sentence.startswith("parameter blocks.1.weight got a gradient past its hook")


def load_and_save(group: RankGroup, job: Job, source: Path, folder: Path) -> None:
    with precision_context(job):
        state = build_components(job, group, folder).state
        newest = newest_checkpoint(source / "checkpoints")
        assert newest is not None
        step, _ = state.restore(newest)
        state.save(step)


CYCLE: list[Case] = [
    (1, ""),
    (3, "zero=3 min_shard_numel=100"),
    (4, "zero=3 shard_group=2"),
    (2, "zero=2"),
    (3, "zero=2", *SMALL),
    (4, "zero=1 shard_group=2"),
    (2, "zero=3 reshard_after_forward=false"),
]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("adapters", ["precision.recipe=bf16"]),
        pytest.param("decoder", ["precision.recipe=fp32", HARD], marks=UNUSED),
    ],
)
def test_a_checkpoint_is_that_of_every_layout(ranks: Ranks, tmp_path: Path, model: str, changes: list[str]) -> None:
    job = job_of(tmp_path, "zero=3", *changes, "run.stop_at=2", model=model)
    ranks.run_places(2, run_job, job, tmp_path / "0", timeout_s=120)
    first = saved_tensors(tmp_path / "0")
    assert any(tensor.count_nonzero() for name, tensor in first.items() if name.startswith("exp_avg_sq/"))
    for number, (world, layout, *settings) in enumerate(CYCLE):
        job = job_of(tmp_path, layout, *changes, *settings, model=model)
        ranks.run(world, load_and_save, job, tmp_path / f"{number}", tmp_path / f"{number + 1}")
        assert same_bits(saved_tensors(tmp_path / f"{number + 1}"), first), (world, layout)
