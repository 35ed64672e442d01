"""Reads a layout to be planned: the grammar of `[layout]`, with `recompute` in addition."""

from dataclasses import replace

from motet.core.errors import InputError, check_input
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.layout import LayoutSettings, parse_layout, parse_stages
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.parallel.pipeline.stages.stage_balance import balance_stages, costs_of_spec
from motet.plan.planned_layout import PlannedLayout, Recompute
from motet.plan.planned_step import PlannedStep
from motet.plan.search.layout_space import SOURCE_PROBLEM

RECOMPUTE: tuple[Recompute, ...] = (
    "none",
    "selective",
    "full",
    "attention",
    "activations",
    "up-projections",
)


# Settings of `[layout]` that a plan has no value for
_NOT_PLANNED = ("data", "server", "rules", "secondary_group", "min_shard_numel")


def layout_from_words(text: str, devices: int, global_batch: int) -> PlannedLayout:
    """The layout of settings such as "tp=8 pp=16 zero=1 recompute=full" on a number of devices."""
    words = text.split()
    chosen = [word.partition("=")[2] for word in words if word.startswith("recompute=")]
    recompute: Recompute = "none"
    if chosen:
        matching = [kind for kind in RECOMPUTE if kind == chosen[-1]]
        check_input(matching, f"recompute = {chosen[-1]!r} in a layout: use one of {', '.join(RECOMPUTE)}")
        recompute = matching[0]
    settings = parse_layout(" ".join(word for word in words if not word.startswith("recompute=")))
    _check_is_planned(text, settings)
    others = settings.tp * settings.cp * settings.pp
    dp = settings.dp or max(1, devices // others)
    product = f"dp = {dp} x tp = {settings.tp} x cp = {settings.cp} x pp = {settings.pp}"
    check_input(
        dp * others == devices,
        f"layout {text!r}: {product} = {dp * others}, but --gpus {devices}; change one of them, or leave dp out",
    )
    if global_batch % dp:
        raise InputError(
            f"layout {text!r}: a global batch of {global_batch} rows cannot be cut evenly over dp = {dp}; choose a "
            f"divisor, or another data.batch_sequences"
        )
    is_pipeline = settings.pp > 1  # Otherwise nothing reads what belongs to pipelines, as in training
    schedule = settings.schedule or ("interleaved" if settings.chunks > 1 else "1f1b")
    if is_pipeline and schedule not in SCHEDULES:
        raise InputError(
            f"layout {text!r}: there is no schedule {schedule!r}, and that of a file cannot be planned; use one of "
            f"{', '.join(SCHEDULES)}"
        )
    microbatches = settings.microbatches or _default_microbatches(settings.pp, global_batch // dp)
    return PlannedLayout(
        dp=dp,
        zero=settings.zero,
        shard_group=settings.shard_group,
        reshard_after_forward=settings.reshard_after_forward,
        reduce_gradients=settings.reduce_gradients,
        tp=settings.tp,
        sp=settings.sp,
        cp=settings.cp,
        cp_kind=settings.cp_kind or "ring",
        pp=settings.pp,
        chunks=settings.chunks if is_pipeline else 1,
        schedule=schedule if is_pipeline else "1f1b",
        stages=settings.stages if is_pipeline else None,
        ep=settings.ep,
        microbatches=microbatches,
        recompute=recompute,
    )


def _check_is_planned(text: str, settings: LayoutSettings) -> None:
    not_planned = [name for name in _NOT_PLANNED if name in settings.model_fields_set]
    check_input(not not_planned, f"layout {text!r}: {', '.join(not_planned)} cannot be planned yet; leave it out")


def with_layout(step: PlannedStep, text: str, devices: int) -> PlannedStep:
    """The step with the layout of a text, and with the stages that the framework cuts the model into."""
    layout = with_balanced_stages(step, layout_from_words(text, devices, step.global_batch))
    step = replace(step, layout=layout)
    check_layout(step)
    return step


def check_layout(step: PlannedStep) -> None:
    """Check that the model and the sequence of a step can be cut as its layout says."""
    layout, layers = step.layout, step.spec.policy_count
    shards = layout.shard_group
    check_input(
        shards is None or layout.dp % shards == 0,
        f"shard_group = {shards} does not divide dp = {layout.dp}; choose a divisor of it",
    )
    if layout.stages is not None:
        stop = parse_stages(layout.stages)[-1].stop
        message = f"stages = {layout.stages!r} hold {stop} blocks, but the model has {layers}"
        check_input(stop == layers, f"{message}; end the last range with block {layers - 1}")
    check_input(
        step.sequence % layout.cp == 0,
        f"cp = {layout.cp} does not divide sequences of {step.sequence} tokens; choose a divisor of it",
    )
    problem = step.spec.split_problem
    check_input(layout.tp == 1 or problem is None, f"tp = {layout.tp}: {problem}; set tp = 1")
    for name in ("pp", "cp"):
        degree = getattr(layout, name)
        message = f"{name} = {degree}: {SOURCE_PROBLEM}; set {name} = 1"
        check_input(degree == 1 or not step.spec.has_source, message)
    experts = step.spec.expert_count or 1
    remedy = "choose a divisor of it" if step.spec.expert_count else "leave ep out for a model without experts"
    check_input(
        experts % layout.ep == 0, f"ep = {layout.ep} does not divide the number of experts, {experts}; {remedy}"
    )


def with_balanced_stages(step: PlannedStep, layout: PlannedLayout) -> PlannedLayout:
    """A layout with the stages that motet cuts a model into, by the time of its blocks, where no others are named."""
    if layout.pp == 1 or layout.stages is not None or not step.stack.balances_stages:
        return layout
    targets = None if step.masked_fraction is None else round(step.sequence * step.masked_fraction)
    costs = costs_of_spec(step.spec, MicroBatchShape(1, step.sequence, targets=targets), step.recipe.compute)
    stages = balance_stages(costs, layout.pp * layout.chunks)
    check_input(
        all(stages),
        f"{len(stages)} stages cannot share {len(costs.times)} blocks; use {len(costs.times)} stages at most",
    )
    return replace(layout, stages=",".join(f"{blocks.start}-{blocks.stop - 1}" for blocks in stages))


def _default_microbatches(pp: int, rows: int) -> int:
    """One without a pipeline, otherwise the most that 4 x pp and the rows of a rank allow."""
    if pp == 1:
        return 1
    return max(count for count in range(1, min(4 * pp, rows) + 1) if rows % count == 0)
