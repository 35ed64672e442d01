"""Rows of `steps.csv`: published times and memory of training steps, as planned steps."""

import re
from dataclasses import replace

from planner.row_models import model_of_row, precision_of_row, training_of_row

from motet.collectives.cost.published_curves import Row, count, optional_number
from motet.core.errors import check_input
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.layout import Layout, layout_of_sizes
from motet.plan.frameworks import STACKS, SoftwareStack
from motet.plan.planned_step import PlannedStep, Recompute
from motet.plan.validation.step_rows import MeasuredHardware, MeasuredMemoryKind, MeasuredStep

STEP_COLUMNS = tuple(
    word
    for line in (
        "id source model layers hidden heads kv_heads ffn vocab seq experts topk moe_ffn gpu gpus gpus_per_node",
        "intra_bw_GBps inter_bw_Gbps_per_gpu tp pp vpp dp cp ep shard micro_batch global_batch recompute precision",
        "seq_parallel schedule tokens_per_s_per_gpu step_time_s peak_mem_GiB notes quality outcome mem_kind",
        "step_time_s_derived tflops_per_gpu flops_def",
    )
    for word in line.split()
)


# A row without any of the other columns is read as if they were empty.
NEEDED_STEP_COLUMNS = ("model", "layers", "hidden", "heads", "seq", "gpu", "gpus", "tp", "pp", "global_batch")


_LEAST_MEASURED = 1e-9  # Far below a time in microseconds, and any other number that is measured


def measured_number(row: Row, name: str) -> float | None:
    """A number that was measured, so that it is not 0; None where the column is empty."""
    value = optional_number(row, name)
    check_input(
        value is None or value >= _LEAST_MEASURED,
        f"row {row.get('id', '')}: {name} = {row.get(name)} is not a measurement; give {_LEAST_MEASURED:g} or more, or "
        "leave it empty",
    )
    return value


def measured_step(row: Row) -> MeasuredStep:
    """A row as a planned step with its measurements."""
    row = dict.fromkeys(STEP_COLUMNS, "") | dict(row)
    model, (recipe, matmul) = model_of_row(row), precision_of_row(row)
    gpus, layout = count(row, "gpus"), _layout(row)
    stack = stack_of_row(row)
    sizes = count(row, "seq"), count(row, "global_batch")
    step = PlannedStep(model, *sizes, layout, recipe, matmul, stack, **training_of_row(row))
    step = replace(step, recompute=_recompute(row["recompute"]))
    inside, between = optional_number(row, "intra_bw_GBps"), optional_number(row, "inter_bw_Gbps_per_gpu")
    hardware = MeasuredHardware(
        row["gpu"],
        gpus,
        min(gpus, count(row, "gpus_per_node", 8)),
        inside and inside * 1e9,
        between and between * 1e9 / 8,
    )
    memory = measured_number(row, "peak_mem_GiB")
    return MeasuredStep(
        row["id"],
        row["source"],
        row["model"],
        row["quality"],
        hardware,
        step,
        _seconds(row, step, gpus),
        memory and memory * 2**30,
        _memory_kind(row["mem_kind"]),
        "OOM" if row["outcome"].upper() == "OOM" else "ok",
    )


def _layout(row: Row) -> Layout:
    tp, pp, cp, gpus = count(row, "tp", 1), count(row, "pp", 1), count(row, "cp", 1), count(row, "gpus")
    shard, schedule = row["shard"], row["schedule"].lower()
    # Interleaved stages of one block where their number was not published
    unknown = -(-count(row, "layers") // pp) if "interleaved" in schedule else 1
    dp, chunks = count(row, "dp", max(1, gpus // (tp * pp * cp))), count(row, "vpp", unknown)
    zero = 3 if "zero3" in shard else 2 if "zero2" in shard else 1 if "zero1" in shard else 0
    dualpipe = "dualpipe" in schedule
    # FSDP in pipelines keeps parameters and sums of gradients from the first to the last micro-batch
    is_kept = "fsdp" in shard and pp > 1
    # A global batch over dp in micro-batches of the published size
    per_rank = count(row, "global_batch") // dp
    rows = count(row, "micro_batch", 1)
    return layout_of_sizes(
        dp=dp,
        zero=zero,
        tp=tp,
        sp=row["seq_parallel"] == "1" and tp > 1,
        cp=cp,
        pp=pp,
        chunks=2 if dualpipe else chunks if pp > 1 else 1,
        schedule="dualpipe-v" if dualpipe else "interleaved" if chunks > 1 and pp > 1 else "1f1b",
        stages=_uneven_stages(row, pp) if chunks == 1 else (),
        ep=count(row, "ep", 1),
        microbatches=_microbatches(per_rank, rows),
        reshard_after_forward="no reshard" not in shard and not is_kept,
        reduces_once=is_kept,
    )


def _microbatches(per_rank: int, rows: int) -> int:
    """The number of micro-batches that comes nearest to the published size, which may leave a remainder."""
    counts = (count for count in range(1, max(1, per_rank) + 1) if per_rank % count == 0)
    return min(counts, key=lambda count: abs(count - per_rank / rows))


def _uneven_stages(row: Row, pp: int) -> tuple[range, ...]:
    """Stages of equally many blocks but for the last, where notes say so: `uneven (7,..,7,1)`."""
    if (match := re.search(r"uneven \((\d+),\.\.,\1,\d+\)", row["notes"])) is None:
        return ()
    size, layers = int(match[1]), count(row, "layers")
    if size * (pp - 1) >= layers:
        return ()
    return tuple(range(size * i, min(size * (i + 1), layers)) for i in range(pp))


def _recompute(text: str) -> Recompute:
    text = text.lower()
    if text.startswith("full"):
        return "full"
    if "op-level" in text:
        return "selective"
    if "attn" in text or text == "selective":
        return "attention"
    has_activations = re.search(r"act|norm|swiglu", text) is not None
    has_projections = re.search(r"up.?proj", text) is not None
    if has_activations and has_projections:
        return "activations and up-projections"
    return "activations" if has_activations else "up-projections" if has_projections else "none"


def stack_of_row(row: Row) -> SoftwareStack:
    """The framework that a source used."""
    source, notes = row["source"].lower(), row["notes"].lower()
    if "torchtitan" in source:
        if re.match(r"eager", notes):
            return STACKS["torchtitan-eager"]
        compiled = STACKS["torchtitan-async-tp" if re.search(r"async[- ]?tp", notes) else "torchtitan-compiled"]
        # Since April 2025 it compiles the loss too; pages of torchtitan have the month in their name
        fuses_loss = re.search(r"2025-?(0[4-9]|1[0-2])|202[6-9]-?[01]\d", source)
        return replace(compiled, memory="fsdp-fused-loss") if fuses_loss else compiled
    if "mosaic" in source or "llm-foundry" in source:
        return STACKS["llm-foundry"]
    if "deepspeed" in row["shard"].lower():
        return STACKS["deepspeed"]
    if "bigscience" in source:
        return STACKS["megatron-deepspeed-blocking" if "launch_blocking=1" in notes else "megatron-deepspeed"]
    if "no flash" in notes or "pre-flash" in notes or "sc21" in row["id"] or "korthikanti" in source:
        return STACKS["megatron-2021"]
    if "deterministic" in notes:
        return STACKS["megatron-deterministic"]
    if "unfused attention" in notes:
        return STACKS["megatron-unfused"]
    return STACKS["megatron"]


def _memory_kind(text: str) -> MeasuredMemoryKind:
    if "reserved" in text:
        return "reserved"
    if "allocated" in text:
        return "allocated last" if "last" in text else "allocated"
    return "outside"


def _seconds(row: Row, step: PlannedStep, gpus: int) -> float | None:
    """The time of a step, from the published figure: itself, tokens/s, or FLOP/s by the stated way to count them."""
    for name in ("step_time_s", "step_time_s_derived"):
        if (value := measured_number(row, name)) is not None:
            return value
    if tokens := measured_number(row, "tokens_per_s_per_gpu"):
        return step.tokens / tokens / gpus
    rate = measured_number(row, "tflops_per_gpu")
    return rate and published_flops(row, step) / gpus / (rate * 1e12)


def published_flops(row: Row, step: PlannedStep) -> float:
    """FLOPs of a step as the source counts them: with full attention, and a recomputed forward where it says so."""
    flops: float = 3 * step.spec.forward_flops(MicroBatchShape(step.global_batch, step.sequence), "full")
    text = row["flops_def"].lower()
    if "causal attention counted half" in text or ("causal" in text and "full" not in text):
        flops = step.model_flops()
    return flops * 4 / 3 if "recompute" in text and "hardware" in text and step.recompute == "full" else flops
