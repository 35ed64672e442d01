"""Plans of small layouts, for tests of their proof."""

from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.step_plan.plan import ParameterInventory, StepPlan, make_step_plan
from motet.precision.recipe import RECIPES

SHAPES = {"w": (10, 4), "b": (10,), "v": (3, 64), "scale": (), "none": (0, 4), "u": (7, 5)}
SMALL = CommunicationSettings(bucket_mib=0.0005, first_bucket_mib=0.0001)


def plan(
    layout: str, ranks: int = 4, overlap: str = "backward", *, apart: bool = False, **shapes: tuple[int, ...]
) -> StepPlan:
    """Make a plan with buckets of a hundred elements, so that there are several."""
    how = SMALL.model_copy(update={"overlap": overlap})
    found = resolve_layout(parse_layout(layout), ranks, 48)
    parameters = ParameterInventory(shapes or SHAPES, {"b": 1, "scale": 1})
    return make_step_plan(
        parameters, found, RECIPES["fp32"], settings=how, batch_sequences=48, independent_replicas=apart
    )


def servers(count: int) -> str:
    return f"data=parameter_server server={{count={count},transport='collectives',slice_mib=0.0005}}"
