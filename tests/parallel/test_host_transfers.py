"""The transfers between host and device in a plan: where they stand, and that each wrong order is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from motet.memory.policy_choice import Place, StatePlaces
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import CommUnitAction
from motet.parallel.layout import Layout
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.check import InvalidStepPlanError, prove_step_plan
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.precision.recipe import RECIPES
from parallel.plans import inventory_of_shapes

SHAPES = {"blocks.0.weight": (12, 8), "blocks.0.bias": (12,), "head.weight": (30, 8)}
Actions = list[CommUnitAction]


def plan_of_stage(zero: int, states: Place) -> StepPlan:
    sharding = DataParallelSharding(2, 2, zero, 2 if zero else 1)
    return make_step_plan(
        inventory_of_shapes(SHAPES, blocks={"blocks.0.weight": 0, "blocks.0.bias": 0}),
        Layout(ParallelDims((("dp", 2),)), sharding),
        RECIPES["bf16"],
        settings=CommunicationSettings(),
        batch_sequences=4,
        places=StatePlaces(states),
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
