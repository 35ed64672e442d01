"""The variants of benchmarks/compressed_training.py: what each sends instead of exact sums, and how many bytes."""

from statistics import fmean
from typing import Any

from parts.study import Study, Variant

RANKS = 2
NO_FEEDBACK = "communication.error_feedback=false"


def _codec(text: str, *more: str) -> tuple[str, ...]:
    return (f"communication.compress_gradients={text}", *more)


VARIANTS = {
    "exact": Variant("exact", (), 7),
    "int8": Variant("`int8`", _codec("int8"), 0),
    "int4": Variant("`int4`", _codec("int4"), 1, without="int4-off"),
    "int4-off": Variant("`int4`, no error feedback", _codec("int4", NO_FEEDBACK), 1, is_without=True),
    "sign": Variant("`sign`", _codec("sign"), 2, without="sign-off"),
    "sign-off": Variant("`sign`, no error feedback", _codec("sign", NO_FEEDBACK), 2, is_without=True),
    "topk": Variant("`topk:keep=0.01`", _codec("topk:keep=0.01"), 3, without="topk-off"),
    "topk-off": Variant(
        "`topk:keep=0.01`, no error feedback", _codec("topk:keep=0.01", NO_FEEDBACK), 3, is_without=True
    ),
    "powersgd": Variant("`powersgd:rank=4`", _codec("powersgd:rank=4"), 4, without="powersgd-off"),
    "powersgd-off": Variant(
        "`powersgd:rank=4`, no error feedback", _codec("powersgd:rank=4", NO_FEEDBACK), 4, is_without=True
    ),
    "zero-plus-plus": Variant(
        "ZeRO++ at stage 3: qwZ `int8`, qgZ `int4`",
        ("layout.zero=3", "communication.compress_parameters=int8", *_codec("int4")),
        5,
        "ZeRO++, stage 3",
    ),
    "diloco": Variant("DiLoCo, every 20 steps", ("outer.every=20",), 6, "DiLoCo, 20"),
    "average": Variant(
        "averaging every 20 steps", ("outer.every=20", "outer.optimizer=average"), 0, "averaging, 20", dashed=True
    ),
}
COMPRESSION_STUDY = Study(
    page="compressed-training",
    variants=VARIANTS,
    reference="exact",
    reference_run="the exact run",
    ranks=RANKS,
    where="on two ranks",
    dashed="dashed: without error feedback (averaging too)",
)


def bytes_per_parameter(settings: list[str]) -> float:
    """The bytes that a rank sends in a step with ring algorithms, on average, by the traffic model of the step plan."""
    import torch

    from motet import load_job
    from motet.models.build import build_trainable_model
    from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
    from motet.parallel.layout import resolve_layout
    from motet.parallel.step_plan.traffic import sent_bytes_per_step
    from motet.precision.recipe import RECIPES

    job = load_job("tiny", settings)
    layout = resolve_layout(job.layout, RANKS, job.data.batch_sequences).sharding
    rings = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
    manner: CommunicationSettings = job.communication.model_copy(update=rings)
    module = build_trainable_model(job.model, 0, torch.float32, torch.device("cpu")).module
    numel = sum(p.numel() for p in module.parameters())
    portions = _portions(module, job, layout)
    sent = fmean(
        sent_bytes_per_step(portions, layout, RECIPES[job.precision.recipe], settings=manner, rank=rank).total
        for rank in range(RANKS)
    )
    return sent / numel / (job.outer.every or 1)  # a meeting sends what a step sends at stage 0: masters in float32


def _portions(module: Any, job: Any, layout: Any) -> Any:
    """Cut the model into comm units as training does."""
    from motet.parallel.data_parallel.buckets import build_buckets
    from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits
    from motet.train.optimizer.sharded_optimizer import group_parameters

    named = dict(module.named_parameters())
    if layout.zero == 3:
        from motet.parallel.data_parallel.fsdp import describe_fsdp_units, find_blocks

        return BucketsAndFSDPUnits(units=describe_fsdp_units(module, find_blocks(module), set()))
    groups = group_parameters(named, job.optimizer)
    place = {name: number for number, members in enumerate(groups.values()) for name in members}
    mib = 2**20 // 4
    limit, first_limit = (
        int(size * mib) for size in (job.communication.bucket_mib, job.communication.first_bucket_mib)
    )
    sizes = {name: (place[name], p.numel()) for name, p in named.items()}
    buckets = build_buckets(sizes, layout.shards, limit, first_max_numel=first_limit)
    return BucketsAndFSDPUnits(buckets, shapes={name: tuple(p.shape) for name, p in named.items()})
