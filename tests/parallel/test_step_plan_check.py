"""The proof covers what the engine does, in every layout."""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import SHAPES, SMALL, plan, servers

from motet.collectives import Program
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout, parse_layout, resolve_layout
from motet.parallel.step_plan.check import (
    InvalidStepPlanError,
    check_rank_matches_plan,
    prove_collective_programs,
    prove_step_plan,
)
from motet.parallel.step_plan.plan import ParameterInventory, make_step_plan, updated_ranges
from motet.precision.recipe import RECIPES


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
        check = prove_step_plan(made)
        assert check.rows == 48 and check.elements == sum(map(prod, SHAPES.values()))
        assert check.copies == (ranks if zero == 0 else ranks // (group or ranks))
        tried += 1
    assert tried >= (20 if 48 % ranks == 0 else 0)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 3), (6, 6)])
def test_servers_among_the_ranks_are_right(ranks: int, count: int) -> None:
    made = plan(servers(count), ranks)
    assert prove_step_plan(made).copies == 1
    owned = {part for portion in made.comm_units for part in portion.shard_ranges}
    assert (0, 0) in owned  # some rank has nothing of some bucket


@pytest.mark.parametrize("layout", ["", "zero=1 shard_group=2", "zero=3 shard_group=3"])
def test_replicas_that_train_apart_are_right(layout: str) -> None:
    made = plan(layout, 6, apart=True)
    assert prove_step_plan(made).ranks == {"": 1, "zero=1 shard_group=2": 2}.get(layout, 3)
    assert len(made.rows_by_rank) == 6


SHAPE = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(SHAPE, min_size=1, max_size=8),
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
    how = SMALL.model_copy(update={"overlap": overlap})
    parameters = ParameterInventory(named, {"p1": 1})
    check = prove_step_plan(make_step_plan(parameters, layout, RECIPES["bf16"], settings=how, batch_sequences=ranks))
    assert check.parameters == len(shapes)


def test_programs_are_proven_for_the_ranks_of_their_groups() -> None:
    layout = resolve_layout(parse_layout("zero=2 shard_group=2"), 6, 6)
    named = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
    played = {(one.collective, one.ranks) for one in prove_collective_programs(layout, named)}
    assert played == {("reduce-scatter", 2), ("all-reduce", 3), ("all-gather", 2)}
    owned = resolve_layout(parse_layout(servers(2)), 3, 3)
    assert {one.collective for one in prove_collective_programs(owned, SMALL)} == {"reduce", "broadcast"}


def test_a_wrong_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from motet.collectives.algorithms import build
    from motet.parallel.step_plan import check

    def broken(*given: Any, **options: Any) -> Program:
        made = build(*given, **options)
        return replace(made, steps=made.steps[:-1])

    monkeypatch.setattr(check, "build", broken)
    with pytest.raises(InvalidStepPlanError, match=r"all-reduce/ring.* is wrong"):
        prove_collective_programs(Layout(4, 1), CommunicationSettings(all_reduce="ring"))


def test_a_thousand_ranks_are_looked_at_by_their_classes() -> None:
    """Not by their number: the work of a copy is done once for all copies, and of a shape once for all parameters."""
    shapes = {f"layer{i}.{name}": (512, 64 * width) for i in range(250) for width, name in enumerate("qkvo", start=1)}
    how = CommunicationSettings()
    for words in ("zero=0", "zero=1", "zero=2 shard_group=8", "zero=3", "zero=3 shard_group=8 secondary_group=2"):
        layout = resolve_layout(parse_layout(words), 1024, 1024)
        parameters = ParameterInventory(shapes, {})
        found = make_step_plan(parameters, layout, RECIPES["bf16"], settings=how, batch_sequences=1024)
        assert prove_step_plan(found).ranks == 1024
        assert len({id(portion.shard_ranges) for portion in found.comm_units}) <= 8
        assert len({id(portion.schedule) for portion in found.comm_units}) == 1


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=2 shard_group=2", "zero=3", servers(3)])
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_ranks_are_held_to_their_plan(layout: str, overlap: str) -> None:
    made = plan(layout, 4, overlap)
    sets = [ranks for move in made.comm_units[0].schedule if move.kind == "norm" for ranks in move.rank_groups]
    counting = {rank for ranks in sets for rank in ranks}
    for rank in range(4):
        ranges = updated_ranges(made, rank)
        check_rank_matches_plan(made, rank, ranges | {"none": (0, 0)}, contributes_to_norm=rank in counting)
        with pytest.raises(InvalidStepPlanError, match=f"rank {rank} (counts|does not count) in the norm"):
            check_rank_matches_plan(made, rank, ranges, contributes_to_norm=rank not in counting)
    ranges = updated_ranges(made, 0)
    name, (first, stop) = next(iter(ranges.items()))
    one_less = f"elements? {first}( to {stop - 2})? of {name}"
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates {one_less}, where its plan says element"):
        check_rank_matches_plan(made, 0, ranges | {name: (first, stop - 1)}, contributes_to_norm=True)
    with pytest.raises(InvalidStepPlanError, match=f"rank 0 updates nothing of {name}, where its plan says"):
        check_rank_matches_plan(made, 0, {n: p for n, p in ranges.items() if n != name}, contributes_to_norm=True)
