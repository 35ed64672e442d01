"""The plan says which rank holds which elements of the state of a tensor; all of them are written once."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from motet.checkpoint.writers import parts_to_write
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelInventory, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.plan import HeldRun, StepPlan, held_runs, make_step_plan
from motet.precision.recipe import RECIPES
from parallel.sharded_inventory import BATCH_SEQUENCES, PLANS, inventory
from parallel.test_shard_spec import local_values


def plan_with_frozen_tensors(name: str) -> StepPlan:
    """The plan of a case, whose up projections are frozen, and which has a buffer outside of the blocks."""
    case = PLANS[name]
    tensors = [replace(t, kind="frozen") if "up" in t.name else t for t in inventory().tensors]
    return make_step_plan(
        ModelInventory((*tensors, TensorInfo("mean", (), "float32", "statistics"))),
        Layout(ParallelDims(tuple(case.sizes.items())), case.sharding),
        RECIPES["fp32"],
        settings=case.settings,
        batch_sequences=12 if case.sizes["dp"] == 3 else BATCH_SEQUENCES,
        independent_replicas=case.has_replicas,
        model_sharding=case.model,
    )


def elements(run: HeldRun, first: int, stop: int) -> list[int]:
    """Numbers of elements of the whole, without padding, by the definition of a shard."""
    return [i for i in local_values(run.spec)[first:stop].tolist() if i >= 0]


@pytest.mark.parametrize("case", PLANS)
def test_each_element_is_written_once_by_a_rank_that_holds_it(case: str) -> None:
    plan = plan_with_frozen_tensors(case)
    runs = [held_runs(plan, rank) for rank in range(plan.dims.ranks)]
    names = {name for tensor in plan.inventory.tensors for name in (tensor.name, *tensor.aliases)}
    assert set().union(*runs) == names
    held = [{name: elements(run, run.start, run.stop) for name, run in each.items()} for each in runs]
    for name, run in ((name, run) for each in runs for name, run in each.items()):
        same = tuple(rank for rank in range(len(runs)) if held[rank].get(name) == held[run.ranks[0]][name])
        assert not held[run.ranks[0]][name] or same == run.ranks, (name, same, run.ranks)
    for tensor in plan.inventory.tensors:
        times: Counter[int] = Counter()
        for rank, by_name in enumerate(runs):
            written = parts_to_write({name: (run, 4) for name, run in by_name.items()}, rank, max_numel=50)
            run, parts = written.get(tensor.name, (None, []))
            times.update(i for part in parts for i in elements(run, *part))
        assert sorted(times) == list(range(prod(tensor.shape))) and set(times.values()) == {1}, tensor.name


@pytest.mark.parametrize(("case", "ranks"), [("pp=2 dp=2 tp=2 zero=0", 8), ("hybrid", 4), ("tp=4 sequence", 4)])
def test_copies_share_the_work(case: str, ranks: int) -> None:
    plan = plan_with_frozen_tensors(case)
    sizes = []
    for rank in range(plan.dims.ranks):
        written = parts_to_write({name: (run, 4) for name, run in held_runs(plan, rank).items()}, rank)
        sizes.append(sum(stop - first for _, parts in written.values() for first, stop in parts))
    assert len(sizes) == ranks and min(sizes) > 0.5 * max(sizes), sizes
