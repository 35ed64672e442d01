"""Reads a layout to be planned: the grammar of `[layout]`, with `recompute` in addition."""

from dataclasses import replace
from typing import get_args

from motet.core.errors import check_input
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.layout import Layout, LayoutSettings, layout_of_settings, parse_layout
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.parallel.pipeline.stages.stage_balance import balance_stages, costs_of_spec
from motet.plan.planned_step import PlannedStep, Recompute
from motet.plan.search.layout_space import SOURCE_PROBLEM

# Settings of `[layout]` that a plan has no value for
_NOT_PLANNED = ("data", "server", "rules", "secondary_group", "min_shard_numel")


def layout_from_words(text: str, devices: int, global_batch: int) -> tuple[Layout, Recompute]:
    """The layout and the recomputation of settings such as "tp=8 pp=16 recompute=full" on a number of devices."""
    words = text.split()
    chosen = [word.partition("=")[2] for word in words if word.startswith("recompute=")]
    kinds: dict[str, Recompute] = {kind: kind for kind in get_args(Recompute) if " " not in kind}
    for kind in chosen:
        check_input(kind in kinds, f"recompute = {kind!r} in a layout: use one of {', '.join(kinds)}")
    settings = parse_layout(" ".join(word for word in words if not word.startswith("recompute=")))
    _check_is_planned(text, settings)
    others = settings.tp * settings.cp * settings.pp
    dp = settings.dp or max(1, devices // others)
    product = f"dp = {dp} x tp = {settings.tp} x cp = {settings.cp} x pp = {settings.pp}"
    check_input(
        dp * others == devices,
        f"layout {text!r}: {product} = {dp * others}, but --gpus {devices}; change one of them, or leave dp out",
    )
    check_input(
        global_batch % dp == 0,
        f"layout {text!r}: a global batch of {global_batch} rows cannot be cut evenly over dp = {dp}; choose a "
        f"divisor, or another data.batch_sequences",
    )
    layout = layout_of_settings(settings, dp, global_batch)
    check_input(
        layout.schedule in SCHEDULES,
        f"layout {text!r}: there is no schedule {layout.schedule!r}, and that of a file cannot be planned; use one of "
        f"{', '.join(SCHEDULES)}",
    )
    return layout, kinds[chosen[-1]] if chosen else "none"


def _check_is_planned(text: str, settings: LayoutSettings) -> None:
    not_planned = [name for name in _NOT_PLANNED if name in settings.model_fields_set]
    check_input(not not_planned, f"layout {text!r}: {', '.join(not_planned)} cannot be planned yet; leave it out")


def with_layout(step: PlannedStep, text: str, devices: int) -> PlannedStep:
    """The step with the layout of a text, and with the stages that the framework cuts the model into."""
    layout, recompute = layout_from_words(text, devices, step.global_batch)
    step = replace(step, layout=with_balanced_stages(step, layout), recompute=recompute)
    check_layout(step)
    return step


def check_layout(step: PlannedStep) -> None:
    """Check that the model and the sequence of a step can be cut as its layout says."""
    layout, layers = step.layout, step.spec.policy_count
    shards, ranks = layout.sharding.shards, layout.sharding.ranks
    check_input(ranks % shards == 0, f"shard_group = {shards} does not divide dp = {ranks}; choose a divisor of it")
    if layout.stages:
        message = (
            f"the stages of layout {str(layout)!r} hold {layout.stages[-1].stop} blocks, but the model has {layers}"
        )
        check_input(layout.stages[-1].stop == layers, f"{message}; end the last range with block {layers - 1}")
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


def with_balanced_stages(step: PlannedStep, layout: Layout) -> Layout:
    """A layout with the stages that motet cuts a model into, by the time of its blocks, where no others are named."""
    if layout.pp == 1 or layout.stages or not step.stack.balances_stages:
        return layout
    targets = None if step.masked_fraction is None else round(step.sequence * step.masked_fraction)
    costs = costs_of_spec(step.spec, MicroBatchShape(1, step.sequence, targets=targets), step.recipe.compute)
    stages = balance_stages(costs, layout.pp * layout.chunks)
    check_input(
        all(stages),
        f"{len(stages)} stages cannot share {len(costs.times)} blocks; use {len(costs.times)} stages at most",
    )
    return replace(layout, stages=tuple(stages))
