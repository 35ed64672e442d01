"""A rank plays its part of a schedule: the numbers of one process, in the declared memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.parallel.linear import LinearProducts, WeightGradientQueue, take_weight_gradients
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.pipeline.player import PipelinePlayer, WireShape
from motet.parallel.pipeline.schedules import make_schedule
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from refusals import refused

WIDTH, ROWS = 6, 3
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("breadth-first", 3), ("zb-interleaved", 2)]
SCHEDULES += [("zb-v", 2), ("dualpipe-v", 2)]


def stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double()


def microbatch_of(index: int) -> Tensor:
    return torch.randn(ROWS + index % 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


@dataclass
class HandMadeStages:
    """Each stage has a layer; the input of the first one crosses all borders beside the hidden state."""

    stages: dict[int, nn.Module]
    last: int
    wrong_width: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    backwards: list[str] = field(default_factory=list)
    queue: WeightGradientQueue = field(default_factory=lambda: WeightGradientQueue(LinearProducts()))

    def wires(self, border: int, microbatch: int) -> Sequence[WireShape]:
        rows = len(microbatch_of(microbatch))
        return [
            WireShape((rows, WIDTH), torch.float64, needs_gradient=True),
            WireShape((rows, WIDTH + self.wrong_width), torch.float64, needs_gradient=False),
        ]

    def forward(self, stage: int, microbatch: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        x, first = received or (microbatch_of(microbatch),) * 2
        hidden = self.stages[stage](x) * first
        if stage < self.last:
            return [hidden, first]
        loss = F.gelu(hidden).square().sum()
        self.losses[microbatch] = loss.item()
        return [loss]

    def backward(self, action: PipelineAction, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        key = action.stage, action.microbatch
        self.backwards.append(str(action))
        if action.kind == "W":
            self.queue.compute(key)
            return
        roots = [output for output in outputs if output.requires_grad]
        if action.kind == "B":
            torch.autograd.backward(roots, gradients or None)
            return
        with self.queue.deferring(key):
            torch.autograd.backward(roots, gradients or None)


def play(
    group: RankGroup, name: str, chunks: int, microbatches: int
) -> tuple[dict[int, float], dict[int, list[Tensor]], int, int]:
    schedule = make_schedule(name, group.world, chunks=chunks, microbatches=microbatches)
    stages = {stage: stage_module(stage) for stage in schedule.stages_of_rank(group.rank)}
    work = HandMadeStages(stages, schedule.stages - 1)
    for stage in stages.values():
        take_weight_gradients(stage, work.queue)
    player = PipelinePlayer(schedule, work, group)
    player.play()
    gradients = {index: [p.grad for p in stage.parameters() if p.grad is not None] for index, stage in stages.items()}
    return work.losses, gradients, player.max_in_flight, schedule.max_in_flight[group.rank]


def in_one_process(stages: int, microbatches: int) -> tuple[dict[int, float], dict[int, list[Tensor]]]:
    modules, losses = [stage_module(stage) for stage in range(stages)], {}
    for microbatch in range(microbatches):
        hidden = first = microbatch_of(microbatch)
        for module in modules:
            hidden = module(hidden) * first
        loss = F.gelu(hidden).square().sum()
        losses[microbatch] = loss.item()
        loss.backward()
    return losses, {i: [p.grad for p in m.parameters() if p.grad is not None] for i, m in enumerate(modules)}


def play_early(group: RankGroup, early_stages: set[int]) -> tuple[list[str], dict[int, list[Tensor]]]:
    schedule = make_schedule("1f1b", group.world, chunks=1, microbatches=3)
    work = HandMadeStages({group.rank: stage_module(group.rank)}, schedule.stages - 1)
    take_weight_gradients(work.stages[group.rank], work.queue)
    PipelinePlayer(schedule, work, group, early_stages=early_stages).play()
    parameters = work.stages[group.rank].parameters()
    return work.backwards, {group.rank: [p.grad for p in parameters if p.grad is not None]}


def test_weight_gradients_wait_until_the_last_gradient_of_a_stage_is_sent(ranks: Ranks) -> None:
    (first, first_tensors), (second, second_tensors), (third, third_tensors) = ranks.run(3, play_early, {0, 2})
    assert first == ["0B0", "0B1", "0B2"]  # Nobody waits for it
    assert second == ["1B0", "1B1", "1B2"]
    assert third == ["2B0", "2B1", "2I2", "2W2"]
    _, wanted = in_one_process(3, 3)
    for stage, tensors in {**first_tensors, **second_tensors, **third_tensors}.items():
        torch.testing.assert_close(tensors, wanted[stage], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("world", "microbatches"), [(2, 5), (3, 6)])
def test_it_computes_what_one_process_computes(
    ranks: Ranks, name: str, chunks: int, world: int, microbatches: int
) -> None:
    wanted_losses, wanted = in_one_process(world * chunks, microbatches)
    results = ranks.run(world, play, name, chunks, microbatches)
    losses = {key: value for result in results for key, value in result[0].items()}
    assert losses == wanted_losses
    found = {stage: tensors for _, gradients, _, _ in results for stage, tensors in gradients.items()}
    assert found.keys() == wanted.keys()
    for stage, tensors in wanted.items():
        torch.testing.assert_close(found[stage], tensors, rtol=1e-13, atol=1e-13)
    assert all(kept == declared for _, _, kept, declared in results)


def play_wrong(group: RankGroup) -> None:
    schedule = make_schedule("1f1b", group.world, chunks=1, microbatches=2)
    work = HandMadeStages({group.rank: stage_module(group.rank)}, schedule.stages - 1, wrong_width=1)
    if group.rank == 0:
        refused(r"tensor 1 .* of shape \[3, 6\] .* but \[3, 7\]", PipelinePlayer(schedule, work, group).play)


def test_a_tensor_of_another_shape_is_not_sent(ranks: Ranks) -> None:
    ranks.run(2, play_wrong)
