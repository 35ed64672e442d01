"""The memory check: what each process needs by the plan of a step, and the limit that it exceeds.

A need is a lower bound, without activations: what a process holds at the same time in the second step of a run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from motet.cluster.memory_limits import MemoryLimit
from motet.core.units import format_bytes
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import PrecisionRecipe
from motet.train.optimizer.optimizer_settings import OptimizerSettings

MemoryNeed = Mapping[str, int]  # What -> bytes, of one process, besides the process itself
MAX_PROPOSED_RANKS = 1024


def memory_need(plan: StepPlan, recipe: PrecisionRecipe, optimizer: OptimizerSettings, *, rank: int) -> MemoryNeed:
    """The need of a rank."""
    moments = optimizer.moments_per_parameter
    state = model_state_memory(plan, recipe, moments_per_parameter=moments, rank=rank)
    return {
        "parameters": state.parameters,
        "master parameters": state.masters,
        "gradients": state.gradients,
        "moments": state.moments,
        "compression errors": state.compression_errors,
        "what is gathered, or not reduced yet": peak_transient_bytes(plan, recipe, rank=rank),
    }


def memory_problem(
    subject: str,
    needs: Sequence[MemoryNeed],
    limits: Iterable[MemoryLimit],
    *,
    index: int | None = None,
    propose: Callable[[int], list[str]] = lambda available: [],
) -> str:
    """A sentence about the limit that is exceeded most, or nothing.

    `needs` are those of all local processes; `index` is that of this one, or None before they are started.
    `propose` gives remedies with which no process needs more than the bytes that are available to it.
    """
    totals = [sum(need.values()) for need in needs]
    alone, count = max(totals) if index is None else totals[index], len(needs)

    def needed_bytes(limit: MemoryLimit) -> int:
        return sum(totals) + count * limit.process_bytes if limit.is_shared else alone + limit.process_bytes

    limit = max(limits, key=lambda each: needed_bytes(each) / max(each.total_bytes, 1))
    needed, shared = needed_bytes(limit), limit.is_shared and count > 1
    if needed <= limit.total_bytes:
        return ""
    largest = needs[totals.index(max(totals) if shared else alone)]
    shown = [f"{format_bytes(size)} of {name}" for name, size in largest.items() if size]
    shown.append(f"{format_bytes(limit.process_bytes)} of the process itself")
    where = f" in {count} processes: in {'each' if len(set(totals)) == 1 else 'the largest'}" if shared else ":"
    available = (limit.total_bytes // count if shared else limit.total_bytes) - limit.process_bytes
    remedies = propose(available)
    if shared and (fitting := limit.total_bytes // (max(totals) + limit.process_bytes)):
        remedies.append(f"start {fitting} on each machine at most")
    *others, last = [*remedies, "take a smaller model"]
    return (
        f"{subject} takes {format_bytes(needed)} of memory at least{where} {', '.join(shown)}; {limit.name} "
        f"{format_bytes(limit.total_bytes)}; {', '.join(others)}{' or ' * bool(others)}{last}"
    )


def layout_memory_problem(
    plan: StepPlan,
    layout: Layout,
    recipe: PrecisionRecipe,
    *,
    optimizer: OptimizerSettings,
    local_ranks: range,
    limits: Iterable[MemoryLimit],
    rank: int | None = None,
) -> str:
    """A sentence if the local ranks of a layout need more than a limit allows; `rank` is this one."""
    count = plan.dims.ranks  # Independent replicas need the same
    distinct = {local % count for local in local_ranks}
    needs = {local: memory_need(plan, recipe, optimizer, rank=local) for local in distinct}

    def propose(available: int) -> list[str]:
        """The first layout of stage 3 in which no rank needs more."""
        sharding = layout.sharding
        is_sharded = sharding.ranks == 1 or (sharding.zero, sharding.shards) == (3, sharding.ranks)
        powers = range(int(is_sharded), (MAX_PROPOSED_RANKS // layout.dims.ranks).bit_length())
        for power in () if plan.outer_groups or sharding.bucket_owners else powers:
            proposed = layout.at_stage_3(2**power)
            rows, communication = proposed.sharding.ranks * proposed.sharding.microbatches, CommunicationSettings()
            parts = plan.inventory, proposed, recipe
            made = make_step_plan(
                *parts, settings=communication, batch_sequences=rows, model_sharding=plan.model_sharding
            )
            first_ranks = {ranks[0] for group in made.groups for ranks in group.group.sum_groups}  # Of equal shards
            needed = max(sum(memory_need(made, recipe, optimizer, rank=r).values()) for r in first_ranks)
            if needed <= available:
                ranks = f" on {made.dims.ranks} ranks" * bool(power)
                return [f"use layout.zero=3{ranks}, where a rank takes {format_bytes(needed)} besides the process"]
        return []

    return memory_problem(
        f"layout '{layout}'",
        [needs[local % count] for local in local_ranks],
        limits,
        index=None if rank is None else local_ranks.index(rank),
        propose=propose,
    )
