"""Mistakes of every kind in how ranks communicate activations, and in whose gradients are partial sums of it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

from sharding_corruptions import Corrupted, corruption, with_rule

from motet.parallel.model_sharding import BoundaryComm, BoundaryOperation, DimensionSplit
from motet.parallel.step_plan.plan import StepPlan


def with_comms(
    plan: StepPlan, random: Random, change: Callable[[BoundaryComm], list[BoundaryComm]]
) -> Corrupted | None:
    comms = plan.model_sharding.boundary_comms
    if not comms:
        return None
    index = random.randrange(len(comms))
    changed = (*comms[:index], *change(comms[index]), *comms[index + 1 :])
    near = tuple(".".join(comm.module.split(".")[:2]) for comm in comms[max(0, index - 1) : index + 2])
    return Corrupted(replace(plan, model_sharding=replace(plan.model_sharding, boundary_comms=changed)), near)


@corruption
def conjugate_missing(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_comms(plan, random, lambda comm: [])


@corruption
def conjugate_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Except for a gather in the place of a sum: both end a region, and only the numbers are different."""
    operation: BoundaryOperation = random.choice(["copy", "sum", "gather", "scatter", "split", "exchange"])

    def change(comm: BoundaryComm) -> list[BoundaryComm]:
        ends = ("sum", "gather")
        return [comm if comm.operation in ends and operation in ends else replace(comm, operation=operation)]

    return with_comms(plan, random, change)


@corruption
def conjugate_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_comms(plan, random, lambda comm: [comm, comm])


@corruption
def scattered_along_another_dimension(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(comm: BoundaryComm) -> list[BoundaryComm]:
        return [replace(comm, dim=2) if comm.operation in ("gather", "scatter") else comm]

    return with_comms(plan, random, change)


@corruption
def block_ends_otherwise(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    entries = plan.model_sharding.activations
    outputs = [index for index, entry in enumerate(entries) if entry.side == "output"]
    if not outputs:
        return None
    entry = entries[index := random.choice(outputs)]
    changed = (*entries[:index], replace(entry, splits=(DimensionSplit(2, "tp"),)), *entries[index + 1 :])
    return Corrupted(replace(plan, model_sharding=replace(plan.model_sharding, activations=changed)), (entry.module,))


@corruption
def region_without_communication(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Both ends of a region are missing, so that its ranks split tensors and add nothing, or miss a part.

    Not those of a tied head: communication surrounds its table elsewhere.
    """
    comms = plan.model_sharding.boundary_comms
    pairs = [i for i, (a, b) in enumerate(pairwise(comms)) if (a.side, b.side) == ("input", "output") and b.module]
    if not pairs:
        return None
    index = random.choice(pairs)
    sharding = replace(plan.model_sharding, boundary_comms=(*comms[:index], *comms[index + 2 :]))
    return Corrupted(replace(plan, model_sharding=sharding), (comms[index].module, comms[index + 1].module))


def with_comm_like(
    plan: StepPlan, random: Random, operations: tuple[str, ...], change: Callable[[BoundaryComm], BoundaryComm]
) -> Corrupted | None:
    comms = plan.model_sharding.boundary_comms
    indices = [index for index, comm in enumerate(comms) if comm.operation in operations and change(comm) != comm]
    if not indices:
        return None
    index = random.choice(indices)
    changed = (*comms[:index], change(comms[index]), *comms[index + 1 :])
    names = (*comms[index].shared_by, *(comm.module for comm in comms[index : index + 3]))
    return Corrupted(replace(plan, model_sharding=replace(plan.model_sharding, boundary_comms=changed)), names)


@corruption
def shared_reader_forgotten(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A layer that reads the same tensor as another one gets it without communication."""
    return with_comm_like(plan, random, ("copy", "gather"), lambda comm: replace(comm, shared_by=comm.shared_by[1:]))


@corruption
def copied_in_place_of_gathered(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_comm_like(plan, random, ("gather",), lambda comm: replace(comm, operation="copy"))


@corruption
def gathered_in_place_of_copied(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """All ranks have what another sequence gives."""
    return with_comm_like(plan, random, ("copy",), lambda comm: replace(comm, operation="gather"))


@corruption
def added_in_place_of_scattered(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_comm_like(plan, random, ("scatter",), lambda comm: replace(comm, operation="sum"))


@corruption
def mixing_module_gets_a_part(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A module that mixes tokens is taken for one of a region."""
    return with_comm_like(plan, random, ("replicate",), lambda comm: replace(comm, operation="gather"))


def with_partial(layout: str, plan: StepPlan, random: Random, ending: str) -> Corrupted | None:
    """The gradient of a tensor is partial over tp where it is not, or is not where it is, and groups follow."""
    names = [t.name for t in plan.inventory.trained if t.name.endswith(ending) and plan.model_sharding.rules]
    if not names:
        return None
    rule = plan.model_sharding.rule(name := random.choice(names))
    changed = replace(rule, partial_over=tuple(sorted({*rule.partial_over} ^ {"tp"})))
    return with_rule(layout, plan, name, changed, made_again=True)


@corruption
def row_bias_summed_or_not(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_partial(layout, plan, random, "attn.out.bias")


@corruption
def norm_of_a_block_summed_or_not(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_partial(layout, plan, random, ".norm.weight")


@corruption
def mixing_module_summed_or_not(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_partial(layout, plan, random, "mix.weight")


@corruption
def norm_of_a_head_summed_or_not(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_partial(layout, plan, random, "q_norm.weight")


def without_entries(plan: StepPlan, random: Random, ending: str) -> Corrupted | None:
    entries = plan.model_sharding.activations
    modules = [each.module for each in entries if each.module.endswith(ending)]
    is_split = any(each.splits for each in entries if each.module == "blocks.0")
    if not modules or not (is_split or ending == "attn.table"):
        return None
    module, side = random.choice(modules), random.choice(["input", "output"])
    kept = tuple(each for each in entries if (each.module, each.side) != (module, side))
    return Corrupted(replace(plan, model_sharding=replace(plan.model_sharding, activations=kept)), (module,))


@corruption
def table_not_declared(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A split tensor without communication whose module is not said to return what is split."""
    return without_entries(plan, random, "attn.table")


@corruption
def mixing_module_not_declared(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return without_entries(plan, random, "mix")
