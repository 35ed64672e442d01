"""Rows of `memory_small_models.csv`: peak allocated memory of the last rank of small Megatron-core models."""

from dataclasses import replace
from typing import Any

from planner.published_rows import measured_number
from planner.row_models import LATENT_ATTENTION

from motet.collectives.cost.published_curves import Row, count, optional_number
from motet.core.errors import check_input
from motet.models.settings import DecoderSettings, MixtureOfExpertsSettings
from motet.parallel.layout import layout_of_sizes
from motet.plan.frameworks import STACKS, SoftwareStack
from motet.plan.planned_step import PlannedStep, Recompute
from motet.plan.validation.step_rows import MeasuredHardware, MeasuredStep
from motet.precision.recipe import RECIPES

COLUMNS = tuple(
    word
    for line in (
        "id platform test nodes gpus_per_node layers hidden heads seq micro_batch global_batch tp pp",
        "vpp_layers_per_stage vpp_stages cp ep etp num_experts topk dist_optimizer seq_parallel",
        "recompute_granularity recompute_modules bf16_fp16 fp8 vocab_note swiglu untie mla mtp",
        "iter_time_s_median peak_alloc_GiB_last_rank",
    )
    for word in line.split()
)
_DEVICES = {"gb200": "GB200", "h100": "H100-SXM-80GB", "a100": "A100-SXM-80GB", "b200": "B200", "gb300": "GB300"}


def measured_step(row: Row) -> MeasuredStep:
    """A row as a planned step with its measurements."""
    platform = row["platform"]
    known = ", ".join(_DEVICES)
    check_input(platform in _DEVICES, f"row {row['id']}: platform {platform!r} is unknown; use one of {known}")
    tp, pp, cp = count(row, "tp", 1), count(row, "pp", 1), count(row, "cp", 1)
    per_host = count(row, "gpus_per_node")
    gpus = count(row, "nodes", 1) * per_host
    dp = gpus // (tp * pp * cp)
    check_input(dp >= 1, f"row {row['id']}: tp x pp x cp = {tp * pp * cp} needs more than {gpus} GPUs; give fewer")
    layers = count(row, "layers")
    per_stage = optional_number(row, "vpp_layers_per_stage")
    chunks = count(row, "vpp_stages", max(1, layers // (pp * int(per_stage))) if per_stage else 1) if pp > 1 else 1
    batch, rows = count(row, "global_batch"), count(row, "micro_batch")
    fp16, ep = row["bf16_fp16"] == "fp16", count(row, "ep", 1)
    has_experts = count(row, "num_experts", 1) > 1
    layout = layout_of_sizes(
        dp=dp,
        shard_group=dp // 2 if "multi_dist_optimizer" in row["test"] else None,  # Two instances
        zero=3 if "fsdp" in row["test"] or "_z3" in row["test"] else 1 if row["dist_optimizer"] == "1" else 0,
        tp=tp,
        sp=row["seq_parallel"] == "1" and tp > 1,
        cp=cp,
        pp=pp,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        ep=ep if has_experts else 1,
        expert_tp=count(row, "etp", tp) if has_experts else 1,
        microbatches=max(1, batch // (dp * rows)),
    )
    recipe = RECIPES["fp16" if fp16 else "fp32" if row["bf16_fp16"] == "fp32" else "bf16"]
    if fp16:  # Gradients are summed in 16 bits, and copied for the optimizer
        recipe = replace(recipe, reduce="float16")
    matmul = "float8" if row["fp8"] else recipe.compute
    sizes = count(row, "seq"), batch
    step = PlannedStep(
        _model(row), *sizes, layout, recipe, matmul, _stack(row, cp), **_training(row, cp), recompute=_recompute(row)
    )
    hardware = MeasuredHardware(_DEVICES[platform], gpus, per_host, None, None)
    peak = measured_number(row, "peak_alloc_GiB_last_rank")
    seconds = measured_number(row, "iter_time_s_median")
    return MeasuredStep(
        row["id"],
        row["test"],
        row["test"],
        "A",
        hardware,
        step,
        seconds,
        peak and peak * 2**30,
        "allocated last",
        "ok",
    )


def _training(row: Row, cp: int) -> dict[str, Any]:
    """Arguments of a step. Dropout is Megatron's default, which tests with context parallelism, latent attention or
    more outputs switch off."""
    has_dropout = (cp == 1 or bool(row["fp8"])) and row["mla"] != "1" and not row["mtp"]
    return {"has_dropout": has_dropout, "extra_outputs": count(row, "mtp", 0)}


def _stack(row: Row, cp: int) -> SoftwareStack:
    """Fused attention: with context parallelism, with float8, and in the tests of Transformer Engine that resume and
    that measure speed; all others, and those of latent attention that is not offloaded, keep probabilities."""
    name = row["test"]
    is_speed = row["fp8"] or "memory_speed" in name or ("_te_" in name and ("resume" in name or "fusion" in name))
    is_fused = cp > 1 or "offloading" in name or (is_speed and row["mla"] != "1")
    return STACKS["megatron" if is_fused else "megatron-unfused"]


def _recompute(row: Row) -> Recompute:
    granularity, modules = row["recompute_granularity"], row["recompute_modules"]
    if granularity == "full":
        return "full"
    if not granularity:
        return "none"
    return "activations" if "act" in modules or "norm" in modules else "attention"


def _model(row: Row) -> DecoderSettings:
    hidden, heads, tp = count(row, "hidden"), count(row, "heads"), count(row, "tp", 1)
    unpadded = 131073 if "131073" in row["vocab_note"] else 50257
    multiple = 128 * tp
    swiglu, experts = row["swiglu"] == "1", count(row, "num_experts", 1)
    # Megatron narrows a gated network, so that it has as many parameters as one without a gate
    inner = count(row, "ffn", 8 * hidden // 3 // 64 * 64 if swiglu else 4 * hidden)
    values: dict[str, Any] = {
        "vocab_size": -(-unpadded // multiple) * multiple,
        "context": count(row, "seq"),
        "layers": count(row, "layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": count(row, "kv_heads", heads),
        "ffn_hidden": inner,
        "gated": swiglu,
        "activation": "silu" if swiglu else "gelu_tanh",
        "norm": "layer",
        "bias": True,
        "positions": "learned",
        "tied": row["untie"] != "1",
        "query_key_norm": "qk_layernorm" in row["test"],
    }
    if experts > 1:
        values["experts"] = MixtureOfExpertsSettings(
            count=experts,
            per_token=count(row, "topk", 1),
            hidden=count(row, "moe_ffn", inner),
            shared=1 if row["mla"] == "1" else 0,
        )
    if row["mla"] == "1":
        values["latent_attention"] = LATENT_ATTENTION
    return DecoderSettings(**values)
