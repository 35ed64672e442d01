"""The memory check in a rank, for any module."""

import torch
from torch import nn

from motet.cluster.memory_limits import MemoryLimit, read_memory_limits
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import refuse_together
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe
from motet.train.memory_check.process_memory import layout_memory_problem
from motet.train.optimizer.optimizer_settings import OptimizerSettings


def check_rank_memory(
    module: nn.Module,
    plan: StepPlan,
    layout: Layout,
    *,
    recipe: PrecisionRecipe,
    optimizer: OptimizerSettings,
    group: RankGroup,
) -> None:
    """Refuse a layout, on all ranks together, in which a rank needs more memory than it may use. A rehearsal does not
    know what ranks may use, which run on other machines."""
    if group.device.type == "meta":
        return
    if group.device.type == "cpu":
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device == group.device]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        limits = [*read_memory_limits(sum(storages.values()))]
    else:
        memory = torch.cuda.get_device_properties(group.device).total_memory
        limits = [MemoryLimit("the GPU has", memory, is_shared=False, process_bytes=0)]
    problem = layout_memory_problem(
        plan,
        layout,
        recipe,
        optimizer=optimizer,
        local_ranks=group.local_ranks or range(group.rank, group.rank + 1),
        limits=limits,
        rank=group.rank,
    )
    refuse_together(problem, group)
