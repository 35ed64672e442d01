"""The plan of the steps of a module, which is checked before anything is sharded."""

from typing import NamedTuple

from torch import nn

from motet.core.trace import span
from motet.memory.settings import MemorySettings
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    without_forward_overlap,
)
from motet.parallel.layout import Layout, LayoutSettings
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.check import prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import PrecisionSettings
from motet.train.job import Job
from motet.train.memory_check.rank_memory import check_rank_memory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.parameter_groups import model_inventory


class ParallelizeSettings(NamedTuple):
    """The sections of a job that `parallelize` takes."""

    layout: LayoutSettings
    optimizer: OptimizerSettings
    communication: CommunicationSettings
    outer: LocalSGDSettings
    precision: PrecisionSettings
    memory: MemorySettings


def plan_of_module(
    module: nn.Module,
    group: RankGroup,
    *,
    layout: Layout,
    settings: ParallelizeSettings | Job,
    batch_sequences: int,
    model_sharding: ModelSharding | None,
) -> StepPlan:
    """The plan of a step, whose memory was checked; the first rank proves it."""
    recipe, communication = settings.precision.resolved, settings.communication
    with span("plan"):
        plan = make_step_plan(
            model_inventory(module, settings.optimizer),
            layout,
            recipe,
            settings=communication,
            batch_sequences=batch_sequences,
            independent_replicas=settings.outer.every is not None,
            model_sharding=model_sharding,
        )
    check_rank_memory(module, plan, layout, recipe=recipe, optimizer=settings.optimizer, group=group)
    if group.rank == 0 or group.device.type == "meta":
        with span("check of the plan"):
            _prove_plan(plan, layout, communication)
    return plan


def _prove_plan(plan: StepPlan, layout: Layout, communication: CommunicationSettings) -> None:
    prove_step_plan(plan)
    named_algorithms = without_forward_overlap(communication) if plan.outer_groups else communication
    prove_collective_programs(layout.sharding, named_algorithms)
