"""Tables and pictures of docs/guide/data-parallelism.md: bytes sent and held by stage, from tested code."""

from functools import cache

from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits, FSDPUnit
from motet.parallel.layout import resolve_layout
from motet.parallel.step_plan.control_collectives import CONTROL_COLLECTIVES
from motet.parallel.step_plan.memory import model_state_memory, peak_transient_bytes
from motet.parallel.step_plan.timeline import TimelineNode, draw_svg
from motet.parallel.step_plan.traffic import sent_bytes_per_step
from motet.precision.recipe import RECIPES
from motet.train.job import load_job
from motet.train.step_graph import step_timeline
from pages import fill_blocks

RINGS = CommunicationSettings(all_reduce="ring", reduce_scatter="ring", all_gather="ring")
MATRICES, NUMEL, ROWS = 16, 2**20, 1024
"""A model of 16 Mi parameters, which every number of ranks here divides."""


def tables() -> dict[str, str]:
    """Name of a place on the page -> its table."""
    return {
        "traffic": traffic_table(),
        "quantised": quantised_table(),
        "memory": memory_table(),
        "control": control_table(),
    }


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


def _portions(layout: DataParallelSharding) -> BucketsAndFSDPUnits:
    """At stage 3 each matrix is a block."""
    if layout.zero == 3:
        return BucketsAndFSDPUnits(
            units=(*(FSDPUnit(((ROWS, NUMEL // ROWS),)) for _ in range(MATRICES)), FSDPUnit((), is_block=False))
        )
    return BucketsAndFSDPUnits(build_buckets({f"w{i}": (0, NUMEL) for i in range(MATRICES)}, layout.shards, 4 * NUMEL))


def _sent(layout: DataParallelSharding, recipe: str, settings: CommunicationSettings = RINGS) -> int:
    ranks = range(layout.ranks)
    found = {
        sent_bytes_per_step(_portions(layout), layout, RECIPES[recipe], settings=settings, rank=rank).total
        for rank in ranks
    }
    assert len(found) == 1
    return found.pop()


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
            kept = model_state_memory(_portions(layout), layout, RECIPES[recipe], moments_per_parameter=2, rank=0)
            cells = (kept.parameters, kept.masters, kept.gradients, kept.moments, kept.total)
            most = kept.total + peak_transient_bytes(_portions(layout), layout, RECIPES[recipe], settings=RINGS)
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
    longest = max(stop for each in OVERLAPS for _, stop in _timeline(each)[1].values())
    nodes, times = _timeline(overlap)
    note = "the job tiny on 4 ranks at stage 0; an all-reduce of all gradients takes 0.6 of the time to compute a step"
    return draw_svg(nodes, times, title=OVERLAPS[overlap], note=note, end_time=longest)


@cache
def _timeline(overlap: str) -> tuple[tuple[TimelineNode, ...], dict[str, tuple[float, float]]]:
    job = load_job("tiny", ["communication.bucket_mib=4", f"communication.overlap={overlap}"])
    return step_timeline(job, resolve_layout(job.layout, 4, job.data.batch_sequences).sharding, 0.6)
