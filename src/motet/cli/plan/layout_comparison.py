"""The output of `motet plan JOB --compare`: memory, time and sent bytes of layouts, side by side, and as a picture."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from motet.cli.output import OutputLine, log, table_lines
from motet.core.errors import InputError
from motet.core.svg import COLOURS, MARGIN, PAGE_WIDTH, Scale, labelled_box, svg_page, text
from motet.core.trace import log_if_slow
from motet.core.units import format_bytes
from motet.parallel.layout import parse_layout
from motet.parallel.pipeline.border_bytes import border_traffic, sent_bytes_by_place
from motet.parallel.step_plan.attention_traffic import sent_attention_bytes
from motet.parallel.step_plan.check import MAX_PROVEN_RANKS
from motet.parallel.step_plan.expert_traffic import sent_expert_bytes
from motet.parallel.step_plan.traffic import sent_activation_bytes, sent_bytes_per_step
from motet.plan.planned_step import PlannedStep
from motet.train.job import Job, batch_shape
from motet.train.job_step_plan import block_policies, blocks_computed_again, step_plan_of_split_job
from motet.train.launch.preflight import check_job

_BAR, _GAP, _LEFT = 26, 12, 300
_QUIET = {"context": "#6e7781", "host": "#6e7781"}  # The same in all layouts


def sent_bytes_of_first_rank(job: Job, step: PlannedStep) -> dict[str, int] | None:
    """Bytes that rank 0 sends in a step, by purpose, as the step plan counts them; None where motet has no plan."""
    layout = step.layout
    if layout.dp > MAX_PROVEN_RANKS:
        return None  # The schedule of a backend's collective takes long to make for more ranks
    try:
        chosen = check_job(job.model_copy(update={"layout": parse_layout(str(layout))}), layout.ranks)
    except (InputError, ValueError):
        return None
    with log_if_slow(log, f"planning the step of layout '{layout}' ..."):
        plan = step_plan_of_split_job(job, chosen)
    if max((len(ranks) for each in plan.groups for ranks in each.group.sum_groups), default=0) > MAX_PROVEN_RANKS:
        return None
    recipe, shape = job.precision.resolved, batch_shape(job, len(plan.rows_by_rank[0][0]))
    sent = vars(sent_bytes_per_step(plan, recipe, settings=job.communication, rank=0))
    named = {f"data parallelism, {kind.replace('_', '-')}": size for kind, size in sent.items()}
    policies = block_policies(job, plan)
    named["tensor parallelism"] = sent_activation_bytes(plan, shape, recipe, rank=0, policies=policies).total
    recomputed = blocks_computed_again(policies)
    named["context parallelism"] = sent_attention_bytes(plan, shape, recipe, rank=0, recomputed=recomputed)
    choices = sent_expert_bytes(job.model, plan, chosen, shape=shape, recipe=recipe, rank=0, recomputed=recomputed)
    named["choices of experts"] = choices.total
    if plan.model_sharding.stages:
        sizes = plan.part_on_rank(shape, 0).sizes_by_name
        borders = border_traffic(plan.model_sharding, sizes, compute=recipe.compute, slices=1)
        schedule = chosen.pipeline_schedule(plan.microbatches)
        named["pipeline messages"] = sent_bytes_by_place(schedule, borders)[0]
    return {name: size for name, size in named.items() if size}


def comparison_lines(plans: Sequence[dict[str, Any]]) -> Iterator[OutputLine]:
    """A table with a column for each layout, whose reports also have `sent_bytes`."""
    rows = [_row("step", [f"{plan['step_time_s']:.3g} s" for plan in plans])]
    rows += [_row(f"  {name}", cells) for name, cells in _named(plans, "time_s", _seconds)]
    rows.append(_row("tokens/s/GPU", [f"{plan['tokens_per_s_per_gpu']:.0f}" for plan in plans]))
    rows.append(_row("memory of the fullest rank", [format_bytes(plan["memory_bytes"]["total"]) for plan in plans]))
    rows += [_row(f"  {name}", cells) for name, cells in _named(plans, "memory_bytes", format_bytes) if name != "total"]
    rows.append(_row("fits", ["yes" if plan["fits"] else "no" for plan in plans]))
    totals = [None if plan["sent_bytes"] is None else sum(plan["sent_bytes"].values()) for plan in plans]
    rows.append(
        _row("rank 0 sends in a step", ["not known" if each is None else format_bytes(each) for each in totals])
    )
    rows += [_row(f"  {name}", cells) for name, cells in _named(plans, "sent_bytes", format_bytes)]
    numbers = [f"layout {number}" for number in range(1, len(plans) + 1)]
    yield from (f"layout {number}: {plan['layout']}" for number, plan in enumerate(plans, 1))
    yield from table_lines(rows, header=("", *numbers), right=range(1, len(plans) + 1))


def _row(name: str, cells: Iterable[str]) -> tuple[str, ...]:
    return (name, *cells)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _named(plans: Sequence[dict[str, Any]], key: str, style: Any) -> Iterator[tuple[str, list[str]]]:
    """The values of a dictionary of each plan, by name, in the order of the largest."""
    parts = [plan[key] or {} for plan in plans]
    names = dict.fromkeys(name for each in parts for name in each)
    for name in sorted(names, key=lambda name: -max(each.get(name, 0) for each in parts)):
        yield name, [style(each[name]) if each.get(name) else "-" for each in parts]


def comparison_picture(plans: Sequence[dict[str, Any]], *, title: str, note: str) -> str:
    """Bars of memory, time and sent bytes of each layout, by part."""
    panels = (
        ("memory of the fullest rank", "memory_bytes", format_bytes),
        ("time of a step", "time_s", _seconds),
        ("bytes that rank 0 sends in a step", "sent_bytes", format_bytes),
    )
    body, legend, top = list[str](), dict[str, str](), 14.0
    for name, key, style in panels:
        parts = [{each: v for each, v in (plan[key] or {}).items() if each != "total"} for plan in plans]
        if not any(map(sum, (each.values() for each in parts))):
            continue
        names = [each for each in dict.fromkeys(n for sizes in parts for n in sizes) if each not in _QUIET]
        fills = {each: COLOURS[i % len(COLOURS)] for i, each in enumerate(names)} | _QUIET
        body.append(text((MARGIN, top), name, "head"))
        scale = Scale(0, max(sum(each.values()) for each in parts), _LEFT, PAGE_WIDTH - 110)
        for number, (plan, sizes) in enumerate(zip(plans, parts, strict=True), 1):
            y = top + 10 + (number - 1) * (_BAR + _GAP)
            body.append(text((MARGIN, y + 17), f"{number}: {plan['layout']}"[: _LEFT // 7], "small"))
            body += _bar(sizes, scale, fills, y=y, style=style)
        used = (each for each in fills if any(sizes.get(each) for sizes in parts))
        legend |= {f"{each} ({name.split()[0]})": fills[each] for each in used}
        top += 10 + len(plans) * (_BAR + _GAP) + 26
    return svg_page(title, note, body, height=top, legend=[(fill, words) for words, fill in legend.items()])


def _bar(sizes: dict[str, float], scale: Scale, fills: dict[str, str], *, y: float, style: Any) -> Iterator[str]:
    below = 0.0
    for name, size in sizes.items():
        x, right = scale(below), scale(below + size)
        place = {"x": x, "y": y, "width": right - x, "height": float(_BAR)}
        yield labelled_box("box", (f"{name} {style(size)}", name), f"{name}: {style(size)}", fill=fills[name], **place)
        below += size
    yield text((scale(below) + 6, y + 17), style(below), "small")
