"""The proof covers what the engine does in every layout; a planted mistake is located: the element and the rank."""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.collectives import Program
from motet.collectives.algorithms import build
from motet.core.errors import InputError
from motet.parallel.data_parallel import comm_units
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout, parse_layout, resolve_layout
from motet.parallel.step_plan.check import (
    InvalidStepPlanError,
    check_rank_matches_plan,
    prove_collective_programs,
    prove_step_plan,
)
from motet.parallel.step_plan.plan import StepPlan
from parallel.plans import inventory_of_shapes, plan_of
from parallel.step_plan_corruptions import HYBRID, INVENTORY, PLANTED, SHAPES, SMALL, VARIANTS, Change, plan, servers
from parallel.symbolic_execution import prove_plan_and_actions


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_layout_is_right(ranks: int) -> None:
    tried = 0
    for zero, group, near, parts, overlap, whole in product(
        range(4), (None, 1, 2, 3, 4), (None, 1, 2, 3), (1, 2, 3), ("backward", "forward"), (0, 30)
    ):
        if 48 % (ranks * parts) or (zero == 0 and group) or (zero < 3 and (near or whole)):
            continue
        words = [f"zero={zero}", f"microbatches={parts}", f"min_shard_numel={whole}"]
        words += [f"shard_group={group}"] if group else []
        words += [f"secondary_group={near}"] if near else []
        try:
            made = plan(" ".join(words), ranks, overlap)
        except InputError:
            continue
        prove_plan_and_actions(made)
        proof = prove_step_plan(made)
        assert proof.rows == 48 and proof.elements == sum(map(prod, SHAPES.values()))
        assert proof.copies == (ranks if zero == 0 else ranks // (group or ranks))
        tried += 1
    assert tried >= (20 if 48 % ranks == 0 else 0)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 3), (6, 6)])
def test_servers_among_the_ranks_are_right(ranks: int, count: int) -> None:
    made = plan(servers(count), ranks)
    prove_plan_and_actions(made)
    assert prove_step_plan(made).copies == 1
    owned = {part for unit in made.comm_units for span in unit.spans for part in span.shard_ranges}
    assert (0, 0) in owned  # some rank has nothing of some bucket


@pytest.mark.parametrize("layout", ["", "zero=1 shard_group=2", "zero=3 shard_group=3"])
def test_replicas_that_train_apart_are_right(layout: str) -> None:
    made = plan(layout, 6, apart=True)
    prove_plan_and_actions(made)
    assert prove_step_plan(made).ranks == {"": 1, "zero=1 shard_group=2": 2}.get(layout, 3)
    assert len(made.rows_by_rank) == 6


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2 shard_group=2", "zero=3", "zero=3 shard_group=1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_in_the_order_of_one_tree_are_right(layout: str, ranks: int) -> None:
    words = layout.replace("shard_group=2", "shard_group=1") if ranks == 1 else layout
    sharding = resolve_layout(parse_layout(words), ranks, 10, reproducible=True).sharding
    made = plan_of(INVENTORY, sharding, settings=SMALL, batch_sequences=10)
    prove_plan_and_actions(made)
    assert prove_step_plan(made).rows == 10


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from(["zero=0", "zero=1", "zero=2", "zero=3", "zero=3 min_shard_numel=20", servers(1)]),
    st.sampled_from(["", " shard_group=2", " shard_group=3", " shard_group=4 secondary_group=2"]),
    st.sampled_from(["forward", "backward"]),
)
def test_odd_shapes_are_right(shapes: list[tuple[int, ...]], ranks: int, stage: str, group: str, overlap: str) -> None:
    named = {f"p{number}": shape for number, shape in enumerate(shapes)}
    try:
        layout = resolve_layout(parse_layout(stage + group), ranks, ranks)
    except InputError:
        return
    how, parameters = SMALL.model_copy(update={"overlap": overlap}), inventory_of_shapes(named, {"p1": 1}, {"p2": 0})
    made = plan_of(parameters, layout.sharding, "bf16", how)
    prove_plan_and_actions(made)
    proof = prove_step_plan(made)
    assert proof.parameters == len(shapes)


def test_programs_are_proven_for_the_ranks_of_their_groups() -> None:
    layout = resolve_layout(parse_layout("zero=2 shard_group=2"), 6, 6)
    named = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
    played = {(one.collective, one.ranks) for one in prove_collective_programs(layout.sharding, named)}
    assert played == {("reduce-scatter", 2), ("all-reduce", 3), ("all-gather", 2)}
    owned = resolve_layout(parse_layout(servers(2)), 3, 3).sharding
    assert {one.collective for one in prove_collective_programs(owned, SMALL)} == {"reduce", "broadcast"}


def test_a_wrong_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **options: Any) -> Program:
        made = build(*given, **options)
        return replace(made, steps=made.steps[:-1])

    monkeypatch.setattr("motet.parallel.step_plan.check.build", broken)
    with pytest.raises(InvalidStepPlanError, match=r"all-reduce/ring.* is wrong"):
        prove_collective_programs(DataParallelSharding(4, 1), CommunicationSettings(all_reduce="ring"))


def test_a_thousand_ranks_are_looked_at_by_their_classes() -> None:
    """Not by their number: the work of a copy is done once for all copies, and of a shape once for all parameters."""
    shapes = {f"layer{i}.{name}": (512, 64 * width) for i in range(250) for width, name in enumerate("qkvo", start=1)}
    parameters = inventory_of_shapes(shapes, blocks={f"layer{i}.{name}": i for i in range(250) for name in "qkvo"})
    for words in ("zero=0", "zero=1", "zero=2 shard_group=8", "zero=3", "zero=3 shard_group=8 secondary_group=2"):
        found = plan_of(parameters, resolve_layout(parse_layout(words), 1024, 1024).sharding, "bf16")
        assert prove_step_plan(found).ranks == 1024
        assert len({id(span.shard_ranges) for unit in found.comm_units for span in unit.spans}) <= 8
        assert len({id(unit.schedule) for unit in found.comm_units if unit.members}) == 1


def bounds_of_rank(made: StepPlan, layout: str, rank: int) -> dict[str, tuple[int, int]]:
    """(first, stop) of each parameter that one of four ranks updates, by the definition of the layout."""
    shards, bounds = {"": 1, "zero=2 shard_group=2": 2}.get(layout, 4), {}
    for unit, member in [(each, member) for each in made.comm_units for member in each.members]:
        if unit.kind == "bucket":
            each, index, offset = unit.gathered_numel // shards, rank % shards, member.start - unit.spans[0].start
        else:
            rows, *rest = SHAPES[member.name]
            each, index, offset = -(-rows // shards) * prod(rest), rank, 0
        if layout == servers(3):  # Each of the first three ranks owns one of the three buckets
            each, index = unit.gathered_numel, 0 if unit.name == f"bucket {rank}" else -1
        if updated := [element for element in range(member.numel) if (offset + element) // each == index]:
            bounds[member.name] = updated[0], updated[-1] + 1
    return bounds


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2 shard_group=2", "zero=3", servers(3)])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_ranks_are_held_to_their_plan(layout: str, overlap: str) -> None:
    made = plan(layout, 4, overlap)
    counting = {"": range(4 if overlap == "forward" else 1), "zero=2 shard_group=2": range(2)}.get(layout, range(4))
    for rank in range(4):
        ranges, counted = bounds_of_rank(made, layout, rank), set(SHAPES if rank in counting else ())
        check_rank_matches_plan(made, rank, ranges | {"none": (0, 0)}, counted_names=counted)
        does = "does not count" if rank in counting else "counts"
        with pytest.raises(InvalidStepPlanError, match=f"rank {rank} {does} v in the norm, unlike its plan"):
            check_rank_matches_plan(made, rank, ranges, counted_names=counted ^ {"v"})
    ranges, counted = bounds_of_rank(made, layout, 0), set(SHAPES)
    name, (first, stop) = next(iter(ranges.items()))
    one_less = f"elements? {first}( to {stop - 2})? of {name}"
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates {one_less}, where its plan says element"):
        check_rank_matches_plan(made, 0, ranges | {name: (first, stop - 1)}, counted_names=counted)
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates nothing of {name}, where its plan says"):
        check_rank_matches_plan(made, 0, {n: p for n, p in ranges.items() if n != name}, counted_names=counted)


# --- planted mistakes -------------------------------------------------------------------------------
@pytest.mark.parametrize(("layout", "change", "sentence"), PLANTED)
def test_a_planted_mistake_is_located(layout: str, change: Change, sentence: str) -> None:
    words, overlap, codec = VARIANTS.get(layout, (layout, "backward", None))
    good = plan(words, overlap=overlap, codec=codec)
    prove_plan_and_actions(good)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_plan_and_actions(change(good))


def test_replicas_that_meet_with_unlike_shards_are_found() -> None:
    good = plan("zero=1 shard_group=2", apart=True)
    with pytest.raises(InvalidStepPlanError, match=r"w: ranks \(0, 1\) are 1 groups of an outer step, not 0"):
        prove_step_plan(replace(good, outer_groups=(*good.outer_groups[::-1], (0, 1))))


# --- mistakes in what the engine reads -------------------------------------------------------------
UNITS = "data_parallel.comm_units"


def floor_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    most = rows // shards
    return shard * most, (shard + 1) * most


def same(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    return [range(rank * 12, rank * 12 + 12)] * layout.sharding.microbatches


def unpadded(length: int, shards: int, index: int, *, owner: int | None = None) -> tuple[int, int]:
    size = length // shards - 1
    return index * size, (index + 1) * size


@pytest.mark.parametrize(
    ("layout", "where", "wrong", "sentence"),
    [
        ("zero=3", f"{UNITS}.shard_rows", floor_rows, r"shard 0 of w is elements \(0, 8\), not \(0, 12\)"),
        (
            "microbatches=2",
            "step_plan.plan.contributing_rows_of_rank",
            same,
            r"row 0 of .* is read 2 times, by ranks \[0, 0\]",
        ),
        ("zero=1", f"{UNITS}.shard_range", unpadded, r"shard 0 of u is elements \(0, 31\), not \(0, 32\)"),
        (
            HYBRID,
            "data_parallel.data_sharding.DataParallelSharding.replica_groups",
            DataParallelSharding.shard_groups,
            "rank 0 adds .* to another shard",
        ),
    ],
)
def test_a_mistake_in_what_the_engine_reads_is_located(
    layout: str, where: str, wrong: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cached in ("_bucket_shard_ranges", "_row_shard_ranges"):
        monkeypatch.setattr(comm_units, cached, getattr(comm_units, cached).__wrapped__)
    monkeypatch.setattr(f"motet.parallel.{where}", wrong)
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_plan_and_actions(plan(layout))


@pytest.mark.parametrize(("shard_group", "compressed"), [(1, {"all_reduce"}), (2, set())])
def test_buckets_of_stage_3_are_compressed_where_there_are_no_rows(shard_group: int, compressed: set[str]) -> None:
    """Beside parameters that are cut into rows, buckets hold small ones, which are sent uncompressed."""
    how = CommunicationSettings(compress_gradients="int8", compress_over="replicas")
    sharding = DataParallelSharding(4, 1, 3, shard_group, min_shard_numel=10**9)
    units = plan_of(INVENTORY, sharding, "fp32", how).comm_units
    assert {a.kind for unit in units for a in unit.schedule if a.codec} == compressed and units[0].kind == "bucket"
