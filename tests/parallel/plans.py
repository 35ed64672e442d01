"""Plans of a step from shapes or from a module, and the optimizer that executes one."""

from collections.abc import Mapping

from torch import nn

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelInventory, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import RECIPES
from motet.train.optimizer.module_plan import model_inventory
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, build_sharded_optimizer


def inventory_of_shapes(
    shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, int] = {}, blocks: Mapping[str, int] = {}
) -> ModelInventory:
    """Trained parameters, by name, with those optimizer groups and blocks that are not the first or none."""
    tensors = (
        TensorInfo(name, shape, "float32", "trained", groups.get(name, 0), block=blocks.get(name))
        for name, shape in shapes.items()
    )
    return ModelInventory(tuple(tensors))


def plan_of(
    inventory: ModelInventory,
    sharding: DataParallelSharding,
    recipe: str = "fp32",
    settings: CommunicationSettings | None = None,
    *,
    batch_sequences: int | None = None,
    independent_replicas: bool = False,
) -> StepPlan:
    """The plan for ranks of data parallelism; without a number of sequences, each micro-batch has one."""
    return make_step_plan(
        inventory,
        Layout(ParallelDims((("dp", sharding.ranks),)), sharding),
        RECIPES[recipe],
        settings=settings or CommunicationSettings(),
        batch_sequences=batch_sequences or sharding.ranks * sharding.microbatches,
        independent_replicas=independent_replicas,
    )


def optimizer_of(
    module: nn.Module,
    sharding: DataParallelSharding,
    group: RankGroup,
    *,
    settings: OptimizerSettings,
    recipe: str,
    communication: CommunicationSettings | None = None,
) -> ShardedOptimizer:
    """The optimizer of a module that is sharded over the ranks of a group."""
    communication = communication or CommunicationSettings()
    plan = plan_of(model_inventory(module, settings), sharding, recipe, communication)
    return build_sharded_optimizer(module, plan, settings, RECIPES[recipe], group=group, communication=communication)
