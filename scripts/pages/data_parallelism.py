"""Tables and pictures of docs/guide/data-parallelism.md: bytes sent and held by stage, from tested code."""

from collections.abc import Iterable
from functools import cache

from motet.cli.show.step_output import draw_svg
from motet.core.units import DTYPE_BYTES, format_seconds
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import MOMENTS, ZERO_STAGES, StageAction, sharded_states
from motet.parallel.layout import Layout, layout_of_sizes
from motet.parallel.model_sharding import ModelInventory, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.time.step_events import StepEvent
from motet.precision.recipe import RECIPES
from motet.train.forecast.planned_job import planned_step
from motet.train.job import load_job
from pages import fill_blocks, markdown_table
from pages.control_collectives import CONTROL_COLLECTIVES

RINGS = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
MATRICES, NUMEL, ROWS = 16, 2**20, 1024
"""A model of 16 Mi parameters, which every number of ranks here divides."""


def tables() -> dict[str, str]:
    """Name of a place on the page -> its table."""
    return {
        "states": states_table(),
        "stages": stages_table(),
        "traffic": traffic_table(),
        "quantised": quantised_table(),
        "memory": memory_table(),
        "control": control_table(),
    }


def states_table() -> str:
    """Whether a rank keeps all or its shard of each state, by stage."""
    placements = (sharded_states(stage) for stage in range(4))
    rows = [
        [str(stage), *("sharded" if is_sharded else "replicated" for is_sharded in placement)]
        for stage, placement in enumerate(placements)
    ]
    return markdown_table(("`layout.zero`", "parameters", "gradients", "master parameters and optimizer states"), rows)


def stages_table() -> str:
    """The actions of each stage, by moment."""

    def cell(actions: Iterable[StageAction]) -> str:
        collectives = (f"{kind} of {tensor} over {over}" if over else kind for kind, _, over, tensor in actions)
        return ", then ".join(collectives).replace("_", "-")

    head = ["stage", *(moment.replace("_", " ").replace("microbatch", "micro-batch") for moment in MOMENTS)]
    rows = [
        [str(stage), *(cell(action for action in actions if action.moment == moment) for moment in MOMENTS)]
        for stage, actions in ZERO_STAGES.items()
    ]
    return markdown_table(head, rows)


STAGES: dict[str, tuple[int, bool, int]] = {
    "stage 0": (0, True, 1),
    "stages 1, 2": (1, True, 1),
    "stage 3": (3, True, 1),
    "stage 3, kept": (3, False, 1),
    "stage 2, 4 micro-batches": (2, True, 4),
    "stage 3, 4 micro-batches": (3, True, 4),
}
"""Column -> (stage, whether stage 3 gathers again for backward, micro-batches)."""


def traffic_table() -> str:
    rows = [f"| | {' | '.join(STAGES)} |", "|---" * (len(STAGES) + 1) + "|"]
    for recipe in ("fp32", "bf16"):
        for ranks in (2, 4, 8):
            layouts = (
                DataParallelSharding(ranks, parts, zero, ranks if zero else 1, reshard_after_forward)
                for zero, reshard_after_forward, parts in STAGES.values()
            )
            cells = " | ".join(f"{_sent(layout, recipe) / (MATRICES * NUMEL):g}" for layout in layouts)
            rows.append(f"| `{recipe}`, {ranks} ranks | {cells} |")
    return "\n".join(rows)


def _plan(sharding: DataParallelSharding, recipe: str, settings: CommunicationSettings = RINGS) -> StepPlan:
    """Each matrix is a block, and a bucket holds four of them."""
    shape = (ROWS, NUMEL // ROWS)
    inventory = ModelInventory(
        tuple(TensorInfo(f"blocks.{i}.w", shape, "float32", "trained", block=i) for i in range(MATRICES))
    )
    mib = 4 * NUMEL * DTYPE_BYTES[RECIPES[recipe].reduce] / 2**20
    return make_step_plan(
        inventory,
        Layout(ParallelDims((("dp", sharding.ranks),)), sharding),
        RECIPES[recipe],
        settings=settings.model_copy(update={"bucket_mib": mib, "first_bucket_mib": mib}),
        batch_sequences=sharding.ranks * sharding.microbatches,
    )


def _sent(sharding: DataParallelSharding, recipe: str, settings: CommunicationSettings = RINGS) -> int:
    plan, ranks = _plan(sharding, recipe, settings), range(sharding.ranks)
    (sent,) = {sent_bytes_per_step(plan, RECIPES[recipe], settings=settings, rank=rank).total for rank in ranks}
    return sent


QUANTISED: dict[str, tuple[dict[str, str], int | None]] = {
    "stage 3": ({}, None),
    "qwZ: `compress_parameters = int8`": ({"compress_parameters": "int8"}, None),
    "hpZ: `secondary_group = 4`": ({}, 4),
    "qgZ: `compress_gradients = int4`": ({"compress_gradients": "int4"}, None),
    "qgZ: `compress_gradients = int8`": ({"compress_gradients": "int8"}, None),
    "qwZ and qgZ (`int4`)": ({"compress_parameters": "int8", "compress_gradients": "int4"}, None),
    "all three (`int4`)": ({"compress_parameters": "int8", "compress_gradients": "int4"}, 4),
}
"""Row -> (settings, neighbours that share a second copy), of ZeRO++."""


def quantised_table() -> str:
    rows = ["| `bf16` | 4 ranks | 8 ranks | 16 ranks | of stage 3, at 16 |", "|---" * 5 + "|"]
    plain = _sent(DataParallelSharding(16, 1, 3, 16), "bf16")
    for name, (settings, near) in QUANTISED.items():
        how = RINGS.model_copy(update=settings)
        layouts = [
            DataParallelSharding(ranks, 1, 3, ranks, secondary_shards=near if near != ranks else None)
            for ranks in (4, 8, 16)
        ]
        sent = [_sent(layout, "bf16", how) for layout in layouts]
        cells = " | ".join(f"{bytes_ / (MATRICES * NUMEL):.3f}" for bytes_ in sent)
        rows.append(f"| {name} | {cells} | {sent[-1] / plain:.1%} |")
    return "\n".join(rows)


def control_table() -> str:
    rows = ["| | what | when | collective | elements |", "|---" * 5 + "|"]
    for name, control in CONTROL_COLLECTIVES.items():
        elements = " + ".join(filter(None, [str(control.fixed_numel or ""), control.further_elements]))
        cells = (name, control.purpose, control.occurrence, control.collective, f"{elements}; `{control.dtype}`")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def memory_table() -> str:
    rows = ["| | parameters | masters | gradients | moments | together | worst moment |", "|---" * 7 + "|"]
    for recipe in ("fp32", "bf16"):
        for zero in (0, 1, 2, 3):
            layout = DataParallelSharding(8, 1, zero, 8 if zero else 1)
            plan = _plan(layout, recipe)
            kept = model_state_memory(plan, RECIPES[recipe], moments_per_parameter=2, rank=0)
            cells = (kept.parameters, kept.masters, kept.gradients, kept.moments, kept.total)
            most = kept.total + peak_transient_bytes(plan, RECIPES[recipe], rank=0)
            shares = " | ".join(f"{cell / (MATRICES * NUMEL):.4g}" for cell in (*cells, most))
            rows.append(f"| `{recipe}`, stage {zero} | {shares} |")
    return "\n".join(rows)


def page() -> str:
    return fill_blocks("guide/data-parallelism.md", tables())


OVERLAPS = {
    "none": "(a) everything is sent after backward",
    "backward": "(b) each bucket is sent when backward has it",
    "forward": "(c) and what comes back is gathered as the next forward needs it",
}


def picture(overlap: str) -> str:
    """A step of stage 0 with one kind of overlap; all pictures have the time axis of the longest."""
    longest = max(event.stop_s for each in OVERLAPS for event in _simulate(each)[1])
    seconds, events = _simulate(overlap)
    note = f"the job gpt2-124m on 16 devices of a100-pcie at stage 0: a step takes {format_seconds(seconds)}"
    return draw_svg(events, title=OVERLAPS[overlap], note=note, end_s=longest)


@cache
def _simulate(overlap: str) -> tuple[float, list[StepEvent]]:
    settings = ["communication.bucket_mib=80", "data.batch_sequences=256", f"communication.overlap={overlap}"]
    job, times = load_job("gpt2-124m", settings), load_planned_cluster("a100-pcie", 16).step_times
    step = planned_step(job, layout_of_sizes(dp=16))
    return times.predict(step).seconds, times.events(step)
