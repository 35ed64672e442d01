"""The variants of benchmarks/compressed_training.py: the messages that replace exact sums, and their bytes."""

from math import prod
from statistics import fmean

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
    from motet import load_job
    from motet.parallel.local_sgd.schedule import LocalSGDSettings
    from motet.parallel.step_plan.traffic import sent_bytes_per_step
    from motet.train.job_step_plan import step_plan_of_job

    job, ring = load_job("tiny", settings), "ring"
    rings = job.communication.model_copy(update={"all_reduce": ring, "reduce_scatter": ring, "all_gather": ring})
    step_job = job.model_copy(update={"communication": rings, "outer": LocalSGDSettings()})
    plan, recipe = step_plan_of_job(step_job, job.layout_for(RANKS)), job.precision.resolved
    sent = fmean(sent_bytes_per_step(plan, recipe, settings=rings, rank=rank).total for rank in range(RANKS))
    numel = sum(prod(tensor.shape) for tensor in plan.inventory.trained)
    return sent / numel / (job.outer.every or 1)  # an outer step sends as much as a step at stage 0: masters in float32
