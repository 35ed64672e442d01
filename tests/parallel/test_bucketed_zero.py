"""Stages 0 to 2 on flat buckets: the same numbers as one rank, the bytes that are promised, and what is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from motet.core.errors import InputError
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings, check_communication
from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits
from motet.parallel.layout import Layout, LayoutSettings, resolve_layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import broadcast_parameters_and_buffers
from motet.parallel.step_plan.traffic_and_memory import sent_bytes_per_step
from motet.precision.recipe import RECIPES
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, build_sharded_optimizer
from ranks import Ranks
from train.runs import Trained, parameters_and_gradients, small_job, train, worst_difference

STEPS = 10
BATCH = "data.batch_sequences=48"
SMALL_BUCKETS = ("communication.bucket_mib=0.02", "communication.first_bucket_mib=0.001")
AHEAD = "communication.overlap=forward"
CASES = [
    (2, 1, ["layout.zero=1"]),
    (3, 1, ["layout.zero=2", *SMALL_BUCKETS]),
    (2, 3, ["layout.zero=1", *SMALL_BUCKETS]),
    (2, 3, ["layout.zero=2"]),
    (4, 1, ["layout.zero=1", "layout.shard_group=2"]),
    (4, 3, ["layout.zero=2", "layout.shard_group=2", *SMALL_BUCKETS]),
    (3, 1, ["layout.zero=0", *SMALL_BUCKETS]),
    (2, 3, ["layout.zero=0", "communication.overlap=none"]),
    (1, 3, ["layout.zero=2"]),
    (3, 2, ["layout.zero=0", *SMALL_BUCKETS, AHEAD]),
    (2, 1, ["layout.zero=1", *SMALL_BUCKETS, AHEAD]),
    (4, 3, ["layout.zero=2", "layout.shard_group=2", *SMALL_BUCKETS, AHEAD]),
]
NAMED = ["communication.all_reduce=tree", "communication.reduce_scatter=bruck", "communication.all_gather=bruck"]


def reference(ranks: Ranks, folder: Path, model: str) -> Trained:
    found: Trained = ranks.run(1, train, small_job(folder, BATCH, model=model), STEPS, timeout_s=240)[0]
    return found


def agrees(ranks: Ranks, folder: Path, model: str, case: tuple[int, int, list[str]], wanted: Trained) -> None:
    world, parts, settings = case
    job = small_job(folder, BATCH, f"layout.microbatches={parts}", *settings, model=model)
    for rank, trained in enumerate(ranks.run(world, train, job, STEPS, timeout_s=240)):
        worst = worst_difference(trained, wanted)
        assert worst < 1e-12, f"{model} {world} ranks x {parts} {settings}, rank {rank}: {worst:.2e}"


def test_every_stage_computes_the_same_numbers(ranks: Ranks, tmp_path: Path) -> None:
    wanted = reference(ranks, tmp_path, "decoder")
    for case in CASES:
        agrees(ranks, tmp_path, "decoder", case, wanted)
    agrees(ranks, tmp_path, "decoder", (4, 1, ["layout.zero=1", "layout.shard_group=2", *NAMED]), wanted)


@pytest.mark.parametrize("model", ["bert", "adapters"])
def test_so_it_does_for_other_models(ranks: Ranks, tmp_path: Path, model: str) -> None:
    wanted = reference(ranks, tmp_path, model)
    for case in (CASES[1], CASES[-3]):
        agrees(ranks, tmp_path, model, case, wanted)


@pytest.mark.proof
@pytest.mark.parametrize("model", ["decoder", "bert", "t5", "classify", "llama", "qwen2", "gpt2", "adapters"])
def test_every_stage_on_every_world(ranks: Ranks, tmp_path: Path, model: str) -> None:
    wanted = reference(ranks, tmp_path, model)
    for world in (1, 2, 3, 4):
        for parts in (1, 3 if 48 % (3 * world) == 0 else 2):
            for zero in (0, 1, 2):
                for buckets in ((), SMALL_BUCKETS):
                    for overlap in ("forward", "backward", "none"):
                        settings = [f"layout.zero={zero}", f"communication.overlap={overlap}", *buckets]
                        agrees(ranks, tmp_path, model, (world, parts, settings), wanted)
    for zero in (1, 2):
        for parts in (1, 3):
            agrees(ranks, tmp_path, model, (4, parts, [f"layout.zero={zero}", "layout.shard_group=2"]), wanted)


def test_the_textbook_holds_where_everything_divides() -> None:
    """Bytes of N ranks, P parameters, gradients of g and parameters of p bytes: 2gP, or (g + p)P, times (N - 1) / N."""
    sizes = {f"w{i}": (0, 4096) for i in range(6)}
    recipe = RECIPES["bf16"]
    settings = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
    for world in (2, 4, 8):
        for zero, bytes_each in ((0, 2 * 4), (1, 4 + 2), (2, 4 + 2)):
            layout = Layout(world, 1, zero, world if zero else 1)
            buckets = build_buckets(sizes, layout.shards, 8192)
            for rank in range(world):
                sent = sent_bytes_per_step(BucketsAndFSDPUnits(buckets), layout, recipe, settings=settings, rank=rank)
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
    broadcast_parameters_and_buffers(module, group)
    layout = resolve_layout(LayoutSettings(zero=zero, microbatches=parts), group.world, group.world * parts)
    settings = CommunicationSettings(bucket_mib=1e-4, first_bucket_mib=1e-4)
    updater = build_sharded_optimizer(module, OptimizerSettings(name="sgd"), RECIPES["fp64"], group, layout, settings)
    for _ in range(2):  # nothing is left over from the step before
        updater.sharded_parameters.begin_step()
        for part in range(parts):
            updater.sharded_parameters.begin_backward(part == 0, part == parts - 1)
            module(inputs(group.rank, part), (group.rank + part) % 2).backward()
            updater.sharded_parameters.end_backward()
    flat = {name: torch.zeros(piece.shape.numel(), dtype=torch.float64) for name, piece in found(updater).items()}
    for name, piece in found(updater).items():
        if updater.sharded_parameters.mesh.contributes_to_norm:
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
    for rank in range(3):
        for part in range(parts):
            alone(inputs(rank, part), (rank + part) % 2).backward()
    got = ranks.run(3, branches, zero, parts)[0]
    for name, parameter in alone.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got[name], wanted.flatten(), rtol=1e-12, atol=1e-12)
    assert got["never.weight"].abs().max() == 0 < got["either.weight"].abs().max()


def save_at(group: RankGroup, job: Job, folder: str, steps: int) -> None:
    with precision_context(job):
        parts = build_components(job, group, Path(folder))
        stepper = parts.make_train_step(job)
        for step in range(steps):
            stepper.step(step, 0.003)
        parts.state.save(steps)


def go_on_at(group: RankGroup, job: Job, folder: str, steps: int) -> Trained:
    """Train some steps more from the checkpoint."""
    with precision_context(job):
        parts = build_components(job, group, Path(folder))
        done, _ = parts.state.restore(Path(folder) / "checkpoints" / "step-00000002")
        stepper, losses, norms = parts.make_train_step(job), [], []
        for step in range(done, done + steps):
            result = stepper.step(step, 0.003)
            losses.append(result.loss)
            norms.append(result.grad_norm)
        return Trained(losses, norms, *parameters_and_gradients(parts), 0.003 * (done + steps))


LAYOUTS = [(1, []), (3, ["layout.zero=2", *SMALL_BUCKETS]), (4, ["layout.zero=1", "layout.shard_group=2"])]


def test_a_checkpoint_of_one_layout_is_read_by_another(ranks: Ranks, tmp_path: Path) -> None:
    whole = {}
    for number, (world, settings) in enumerate(LAYOUTS):
        job, folder = small_job(tmp_path, BATCH, *settings), tmp_path / f"{world}"
        ranks.run(world, save_at, job, str(folder), 2)
        for other, others in (LAYOUTS[number], LAYOUTS[number - 1]):
            again = small_job(tmp_path, BATCH, *others)
            whole[world, other] = ranks.run(other, go_on_at, again, str(folder), 3)[0]
    first = next(iter(whole.values()))
    for (world, other), trained in whole.items():
        assert worst_difference(trained, first) < 1e-12, (world, other)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"all_reduce": "rings"}, "communication.all_reduce = 'rings': .*nearest: ring"),
        ({"all_reduce": "naive"}, "adds in another order on each rank"),
        ({"all_reduce": "torus-2d"}, "2 ranks: all-reduce/torus-2d takes 4, 6"),
        ({"all_gather": "nothing"}, "communication.all_gather = 'nothing'"),
    ],
)
def test_algorithms_that_do_not_do_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        check_communication(CommunicationSettings(**settings), Layout(6, 1, 1, 3))


def test_a_shard_group_must_divide_the_ranks() -> None:
    sentence = "shard_group = 4 does not divide 6 ranks of data parallelism; use one of 1, 2, 3, 6"
    with pytest.raises(InputError, match=sentence):
        resolve_layout(LayoutSettings(zero=1, shard_group=4), 6, 12)
