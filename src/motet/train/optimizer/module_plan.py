"""The plan of the steps of a module, which is checked before anything is sharded.

Groups of parameters with one learning-rate scale and one weight decay, and the inventory that names them.
"""

import fnmatch
from typing import NamedTuple

from torch import nn

from motet.core.errors import check_input
from motet.core.trace import span
from motet.memory.policy_choice import MemorySettings
from motet.models.parameter_values import parameter_shapes
from motet.models.spec.stacked_experts import stacked_vectors
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    without_forward_overlap,
)
from motet.parallel.layout import Layout, LayoutSettings
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.parallel.model_sharding import ModelInventory, ModelSharding
from motet.parallel.process.module_inventory import inventory_of_module
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.check import prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import PrecisionSettings
from motet.train.job import Job
from motet.train.memory_check.rank_memory import check_rank_memory
from motet.train.memory_check.step_prediction import predict_host_activations
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# (learning-rate scale, weight decay): parameters with the same key share one flat tensor.
ParameterGroupKey = tuple[float, float]
ParameterGroups = dict[ParameterGroupKey, dict[str, nn.Parameter]]


def group_parameters(module: nn.Module, settings: OptimizerSettings) -> ParameterGroups:
    """Trained parameters by learning-rate scale and weight decay, in the order of the module."""
    groups: ParameterGroups = {}
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    vectors = stacked_vectors(parameter_shapes(module))
    unmatched = {pattern for group in settings.groups for pattern in group.match}
    for name, parameter in named.items():
        scale, decay = 1.0, settings.weight_decay if parameter.ndim > 1 and name not in vectors else 0.0
        for group in settings.groups:
            hits = {pattern for pattern in group.match if fnmatch.fnmatchcase(name, pattern)}
            unmatched -= hits
            if hits:
                scale = group.learning_rate_scale
                decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((scale, decay), {})[name] = parameter
    first, examples = min(unmatched, default=""), ", ".join(list(named)[:3])
    sentence = f"optimizer.groups: no trainable parameter's name matches {first!r}; names look like {examples}"
    check_input(not unmatched, sentence)
    return groups


def model_inventory(module: nn.Module, settings: OptimizerSettings) -> ModelInventory:
    """The tensors of a module, with the optimizer groups of the parameters that are trained."""
    _, in_order = grouped_parameters(module, settings)
    return inventory_of_module(module, {name: group_id for name, (group_id, _) in in_order.items()})


def grouped_parameters(
    module: nn.Module, settings: OptimizerSettings
) -> tuple[list[ParameterGroupKey], dict[str, tuple[int, nn.Parameter]]]:
    """The keys of the groups, and the group and the parameter of each name."""
    groups = group_parameters(module, settings)
    group_ids = {name: group_id for group_id, members in enumerate(groups.values()) for name in members}
    trained = {name: p for name, p in module.named_parameters() if name in group_ids}
    return list(groups), {name: (group_ids[name], p) for name, p in trained.items()}


class ParallelizeSettings(NamedTuple):
    """The sections of a job that `parallelize` takes."""

    layout: LayoutSettings = LayoutSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    communication: CommunicationSettings = CommunicationSettings()
    outer: LocalSGDSettings = LocalSGDSettings()
    precision: PrecisionSettings = PrecisionSettings()
    memory: MemorySettings = MemorySettings()


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
            places=settings.memory.places,
        )

    def activations_on_host(rank: int) -> int:
        """The bytes of a rank, where the sizes of the model and of its batches are known."""
        return (
            predict_host_activations(settings, plan, layout, rank=rank).peak_bytes if isinstance(settings, Job) else 0
        )

    check_rank_memory(
        module,
        plan,
        layout,
        recipe=recipe,
        optimizer=settings.optimizer,
        group=group,
        activations_on_host=activations_on_host,
    )
    if group.rank == 0 or group.device.type == "meta":
        with span("check of the plan"):
            _prove_plan(plan, layout, communication)
    return plan


def _prove_plan(plan: StepPlan, layout: Layout, communication: CommunicationSettings) -> None:
    prove_step_plan(plan)
    named_algorithms = without_forward_overlap(communication) if plan.outer_groups else communication
    prove_collective_programs(layout.sharding, named_algorithms)
