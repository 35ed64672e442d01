"""The memory check in a rank, and the policies of recomputation on which ranks agree after steps that they measured.

Both work for any module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from motet.cluster.host_limits import MemoryLimit, read_memory_limits
from motet.collectives.execute.api import all_reduce
from motet.core.units import format_bytes
from motet.memory.measured_costs import MEASURED_STEPS, CostMeasurement
from motet.memory.policy_choice import POLICIES, BlockCosts, ChoiceProblem, MemorySettings, PolicyCost
from motet.memory.recompute import Recomputation, recompute_blocks
from motet.memory.storage_tracker import tensors_reachable_from
from motet.models.spec.layer_specs import BlockPolicy
from motet.monitor.events import RecomputationChosen
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup, refuse_together
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.recipe import PrecisionRecipe
from motet.train.memory_check.step_prediction import LimitedPlaces, layout_memory_problem
from motet.train.optimizer.optimizer_settings import OptimizerSettings


def check_rank_memory(
    module: nn.Module,
    plan: StepPlan,
    layout: Layout,
    *,
    recipe: PrecisionRecipe,
    optimizer: OptimizerSettings,
    group: RankGroup,
    activations_on_host: Callable[[int], int] = lambda rank: 0,
) -> None:
    """Refuse a layout, on all ranks together, in which a rank needs more memory than it may use;
    `activations_on_host` are the bytes of a rank. A rehearsal does not know the limits of ranks, which run on other
    machines."""
    if group.device.type == "meta":
        return
    if group.device.type == "cpu":
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device == group.device]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        limits = [*read_memory_limits(sum(storages.values()))]
    else:
        memory = torch.cuda.get_device_properties(group.device).total_memory
        limits = [MemoryLimit("the GPU has", memory, is_shared=False, process_bytes=0)]
    find_problem = partial(
        layout_memory_problem,
        plan,
        layout,
        recipe,
        optimizer=optimizer,
        local_ranks=group.local_ranks or range(group.rank, group.rank + 1),
        rank=group.rank,
    )
    places = partial(LimitedPlaces, activations_on_host=activations_on_host)
    if group.device.type == "cpu":
        problem = find_problem(limits=limits, places=places(("device", "host")))
    else:
        problem = find_problem(limits=limits, places=places(("device",)))
        problem = problem or find_problem(limits=read_memory_limits(0), places=places(("host",)))
    refuse_together(problem, group)


_IMPOSSIBLE = 2.0**60
_RESERVE = 100  # One part of the budget in this many is left for batches that take more than the measured ones


def usable_bytes(budget: int) -> int:
    """The predicted peak that a budget allows."""
    return budget - -(-budget // _RESERVE)


def budget_for(peak: int) -> int:
    """The smallest budget that allows a predicted peak."""
    return -(-peak * _RESERVE // (_RESERVE - 1)) + 1


@dataclass(frozen=True)
class AgreedCosts:
    """The largest costs that a rank has measured, the same on all ranks that run a block."""

    blocks: Mapping[int, BlockCosts]  # Blocks of this rank, in the order in which they run
    in_flight: Mapping[int, int]
    elsewhere: int

    @property
    def problem(self) -> ChoiceProblem:
        """The problem of this rank."""
        return ChoiceProblem([*self.blocks.values()], [self.in_flight[b] for b in self.blocks], self.elsewhere)


def agree_on_costs(measurement: CostMeasurement, blocks: int, group: RankGroup) -> AgreedCosts:
    """The costs of the blocks of this rank, each the largest of any rank."""
    costs, elsewhere, in_flight = measurement.costs()
    table = torch.zeros(blocks, len(POLICIES), 4, dtype=torch.float64)
    flights = torch.zeros(blocks + 1, dtype=torch.float64)
    flights[-1] = elsewhere
    for block, policy_costs in costs.items():
        flights[block] = max(in_flight[block], 1)
        for index, policy in enumerate(POLICIES):
            cost = policy_costs.get(policy)
            values = (cost.saved, cost.forward, cost.backward, cost.seconds) if cost else (0, 0, 0, _IMPOSSIBLE)
            table[block, index] = torch.tensor(values, dtype=torch.float64)
    for tensor in (table, flights):
        shared = tensor.to(group.device)
        all_reduce(shared, group, op="max")
        tensor.copy_(shared)
    agreed = dict[int, BlockCosts]()
    for block in costs:
        rows = zip(POLICIES, table[block].tolist(), strict=True)
        agreed[block] = {
            policy: PolicyCost(int(saved), int(forward), int(backward), seconds)
            for policy, (saved, forward, backward, seconds) in rows
            if seconds < _IMPOSSIBLE
        }
    return AgreedCosts(agreed, {block: int(flights[block]) for block in costs}, int(flights[-1]))


@dataclass
class RecomputedSteps:
    """Recomputation over the steps of an engine: while policies are measured, and when they are chosen."""

    recomputation: Recomputation | None = None  # None: all tensors are saved
    budget: int | None = None
    group: RankGroup | None = None
    roots: tuple[object, ...] = ()  # They hold the tensors that a rank has between steps
    _choice: RecomputationChosen | None = None

    @classmethod
    def for_module(
        cls, module: nn.Module, settings: MemorySettings, group: RankGroup, *, stages: Sequence[range] = ()
    ) -> "RecomputedSteps":
        """Let the blocks of a module be recomputed, or their saved tensors lie on the host."""
        steps = cls(budget=settings.step_budget, group=group)
        steps.recomputation = recompute_blocks(
            module, settings, device=group.device, known=steps.known_tensors, stages=stages
        )
        return steps

    def known_tensors(self) -> list[Tensor]:
        """The tensors that this rank has between steps, without buffers of messages."""
        return tensors_reachable_from(*self.roots, without=(RankGroup, ProcessGroup))

    def begin_step(self) -> None:
        """Called before the forwards of a step."""
        if self.recomputation is not None:
            self.recomputation.begin_step()

    def end_backwards(self) -> None:
        """Called after the backwards of a step."""
        if self.recomputation is not None:
            self.recomputation.end_backwards()

    def end_step(self) -> None:
        """Called after the update. All ranks call this."""
        measurement = self.recomputation and self.recomputation.end_step()
        if measurement and self.recomputation and self.budget is not None and self.group is not None:
            self._choice = choose_policies(self.recomputation, measurement, budget=self.budget, group=self.group)

    def take_choice(self, step: int) -> RecomputationChosen | None:
        """The choice that was made after this step, once."""
        choice, self._choice = self._choice, None
        return choice and choice.model_copy(update={"step": step})


def choose_policies(
    recomputation: Recomputation, measurement: CostMeasurement, *, budget: int, group: RankGroup
) -> RecomputationChosen:
    """Give the blocks the quickest policies with which each rank stays within its budget. All ranks call this."""
    blocks = len(recomputation.policies)
    agreed = agree_on_costs(measurement, blocks, group)
    problem, chosen = agreed.problem, agreed.problem.choose(usable_bytes(budget))
    least = budget_for(problem.peak(["full"] * len(agreed.blocks)))
    refuse_together(
        ""
        if chosen
        else f"memory.budget = {budget} is too little: a step takes {format_bytes(least)} ({least} bytes) on rank "
        f"{group.rank} with all blocks recomputed; raise memory.budget to it, use smaller micro-batches "
        "(layout.microbatches), or shard more (layout.zero, layout.tp)",
        group,
    )
    assert chosen is not None
    codes = torch.zeros(blocks + 2, dtype=torch.float64)
    for block, policy in zip(agreed.blocks, chosen.policies, strict=True):
        codes[block] = POLICIES.index(policy)
    codes[-2], codes[-1] = chosen.peak_bytes, chosen.seconds
    shared = codes.to(group.device)
    all_reduce(shared, group, op="max")
    *policy_codes, peak, seconds = shared.tolist()
    policies: list[BlockPolicy] = [POLICIES[int(code)] for code in policy_codes]
    recomputation.policies = policies
    counts = {policy: policies.count(policy) for policy in POLICIES}
    return RecomputationChosen(
        step=len(MEASURED_STEPS),
        budget=budget,
        kept=counts["none"],
        selective=counts["selective"],
        full=counts["full"],
        predicted_peak=int(peak),
        seconds_per_microbatch=seconds,
    )
