"""The transfers between host and device in a plan: where they stand, and that each wrong order is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from motet.memory.policy_choice import Place, StatePlaces
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import CommUnitAction, Moment
from motet.parallel.layout import Layout
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.check import InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.traffic import host_link_bytes
from motet.precision.recipe import RECIPES
from parallel.plans import inventory_of_shapes

SHAPES = {"blocks.0.weight": (12, 8), "blocks.0.bias": (12,), "head.weight": (30, 8)}
Actions = list[CommUnitAction]


def plan_of_stage(zero: int, states: Place, parameters: Place = "device", *, ranks: int = 2, **more: bool) -> StepPlan:
    sharding = DataParallelSharding(ranks, 2, zero, ranks if zero else 1, **more)
    return make_step_plan(
        inventory_of_shapes(SHAPES, blocks={"blocks.0.weight": 0, "blocks.0.bias": 0}),
        Layout(ParallelDims((("dp", ranks),)), sharding),
        RECIPES["bf16"],
        settings=CommunicationSettings(),
        batch_sequences=4,
        places=StatePlaces(states, parameters),
    )


def changed(plan: StepPlan, change: Callable[[Actions], object]) -> StepPlan:
    """The plan with other actions on all units that have members."""
    groups = []
    for group in plan.groups:
        units = []
        for unit in group.units:
            actions = list(unit.schedule)
            if unit.members:
                change(actions)
            units.append(replace(unit, schedule=tuple(actions)))
        groups.append(replace(group, units=tuple(units)))
    return replace(plan, groups=tuple(groups))


def position(actions: Actions, kind: str) -> int:
    return [action.kind for action in actions].index(kind)


def move(kind: str, before: str) -> Callable[[Actions], object]:
    def change(actions: Actions) -> None:
        action = actions.pop(position(actions, kind))
        actions.insert(position(actions, before), action)

    return change


MISTAKES: dict[str, tuple[Callable[[Actions], object], str]] = {
    "a gradient is sent before its reduction": (
        lambda actions: actions.insert(0, actions.pop(position(actions, "to_host"))),
        "sums that have not arrived, or are not complete",
    ),
    "an update does not wait for gradients": (move("update", "to_host"), "sums that have not arrived"),
    "parameters are sent before the update": (move("to_device", "update"), "values that have not arrived"),
    "nothing is sent to the host": (lambda actions: actions.pop(position(actions, "to_host")), "to_host happens 0"),
    "nothing is sent to the device": (
        lambda actions: actions.pop(position(actions, "to_device")),
        "to_device happens 0",
    ),
    "gradients are sent twice": (
        lambda actions: actions.insert(position(actions, "norm"), actions[position(actions, "to_host")]),
        "to_host happens 2",
    ),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("states", ["host", "disk"])
def test_each_stage_sends_sums_down_and_values_up(zero: int, states: Place) -> None:
    plan = plan_of_stage(zero, states)
    prove_step_plan(plan)
    for unit in plan.comm_units:
        kinds = [action.kind for action in unit.schedule if action.moment in ("last_microbatch", "step")]
        order = [kind for kind in kinds if kind in ("to_host", "norm", "update", "to_device", "all_gather")]
        assert order == ["to_host", "norm", "update", "to_device", *["all_gather"] * (zero in (1, 2))]


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_transfer_is_refused(mistake: str, zero: int) -> None:
    change, sentence = MISTAKES[mistake]
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(changed(plan_of_stage(zero, "host"), change))


def test_a_gather_before_values_arrive_is_refused() -> None:
    with pytest.raises(InvalidStepPlanError, match="gather values that have not arrived"):
        prove_step_plan(changed(plan_of_stage(2, "host"), move("all_gather", "to_device")))


def test_transfers_of_states_on_the_device_are_refused() -> None:
    with pytest.raises(InvalidStepPlanError, match="to_host happens 1 times, not 0"):
        prove_step_plan(replace(plan_of_stage(2, "host"), states="device"))


# --- rows on the host ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("reduces_once", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
def test_rows_travel_before_gathers_and_sums_after_reductions(
    ranks: int, states: Place, reduces_once: bool, reshards: bool
) -> None:
    plan = plan_of_stage(3, states, "host", ranks=ranks, reduces_once=reduces_once, reshard_after_forward=reshards)
    prove_step_plan(plan)
    gather, scatter = (["all_gather"], ["reduce_scatter"]) if ranks > 1 else ([], [])
    for unit in plan.comm_units:
        kinds = [(action.moment, action.kind) for action in unit.schedule]
        assert [kind for moment, kind in kinds if moment == "forward"] == ["to_device", *gather]
        again = ["to_device", *gather] if unit.kind == "block" and reshards else []
        assert [kind for moment, kind in kinds if moment == "backward"] == again
        reduced = "last_microbatch" if reduces_once else "microbatch"
        assert [kind for moment, kind in kinds if moment == reduced] == [*scatter, "to_host"]
        assert [kind for moment, kind in kinds if moment == "step"] == ["norm", "update"]


def test_one_rank_has_rows_only_on_the_host() -> None:
    kinds = [
        {unit.kind for unit in plan_of_stage(3, "host", place, ranks=1).comm_units} for place in ("device", "host")
    ]
    assert kinds == [{"bucket"}, {"block", "root"}]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_of_rows_on_the_host(ranks: int, microbatches: int) -> None:
    plan = replace(plan_of_stage(3, "host", "host", ranks=ranks), microbatches=microbatches)
    link = host_link_bytes(plan, RECIPES["bf16"], rank=0)
    block, root = (12 * 8 + 12) * 4 // ranks, 30 * 8 * 4 // ranks
    assert link.fetched == link.to_device == microbatches * (2 * block + root)
    assert (link.to_host, link.kept) == (microbatches * (block + root), block + root)


def without(kind: str, moment: str) -> Callable[[Actions], object]:
    def change(actions: Actions) -> None:
        actions[:] = [action for action in actions if (action.kind, action.moment) != (kind, moment)]

    return change


def swapped(moment: str) -> Callable[[Actions], object]:
    def change(actions: Actions) -> None:
        first, second = (index for index, action in enumerate(actions) if action.moment == moment)
        actions[first], actions[second] = actions[second], actions[first]

    return change


def at_moment(kind: str, moment: Moment) -> Callable[[Actions], object]:
    def change(actions: Actions) -> None:
        index = position(actions, kind)
        actions[index] = replace(actions[index], moment=moment)

    return change


MISTAKES_OF_ROWS: dict[str, tuple[Callable[[Actions], object], str]] = {
    "rows do not travel before a forward": (without("to_device", "forward"), "rows travel .* 0 times in forward"),
    "rows travel after a gather": (swapped("forward"), "gather rows in forward that have not arrived"),
    "sums travel once": (at_moment("to_host", "last_microbatch"), "travel to the host at another .last_microbatch."),
    "rows travel after an update": (
        lambda actions: actions.append(replace(actions[0], moment="step")),
        "to_device happens 1 times, not 0",
    ),
    "sums stay on the device": (without("to_host", "microbatch"), "to_host happens 0 times, not 1"),
    "sums travel before they are reduced": (move("to_host", "reduce_scatter"), "sums that have not arrived"),
    "an update does not wait": (move("update", "to_host"), "sums that have not arrived"),
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_ROWS)
def test_a_wrong_transfer_of_rows_is_refused(mistake: str) -> None:
    change, sentence = MISTAKES_OF_ROWS[mistake]
    with pytest.raises(InvalidStepPlanError, match=sentence):
        prove_step_plan(changed(plan_of_stage(3, "host", "host"), change))


def test_a_block_whose_rows_travel_once_is_refused() -> None:
    plan = plan_of_stage(3, "host", "host")
    change = without("to_device", "backward")
    with pytest.raises(InvalidStepPlanError, match="rows travel to the device 0 times in backward, not 1"):
        prove_step_plan(changed(plan, change))


def test_rows_of_the_device_that_travel_are_refused() -> None:
    with pytest.raises(InvalidStepPlanError, match="to_device happens 0 times, not 1"):
        prove_step_plan(replace(plan_of_stage(3, "host", "host"), parameters="device"))
