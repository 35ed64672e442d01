"""The part of `motet show layout` about context parallelism: what ranks send inside of attention, and their work."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from motet.cli.output import OutputLine, table_lines
from motet.core.units import format_bytes
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import fullest_share
from motet.parallel.step_plan.attention_traffic import AttentionComm, attention_comms, sent_attention_bytes
from motet.parallel.step_plan.plan import StepPlan
from motet.train.job import Job
from motet.train.job_step_plan import recomputed_blocks


def attention_report(job: Job, plan: StepPlan, shape: MicroBatchShape) -> dict[str, Any] | None:
    """The communication of the first rank inside of attention, and the parts of each row; None if ranks have whole
    rows. Neighbouring calls that send alike are one entry."""
    if plan.context.ranks == 1:
        return None
    recipe, context = job.precision.resolved, plan.context
    partition = context.partition(shape.length)
    comms = attention_comms(plan, shape, recipe, rank=0)
    visible = {PlaceVisibility.in_call(call) for call in plan.model_sharding.attention}
    return {
        "kind": context.kind,
        "inner": context.inner,
        "order": context.order,
        "tokens": shape.length,
        "spans_by_rank": partition.spans_by_rank,
        "calls": [_entry(list(alike)) for _, alike in groupby(comms, key=_what_is_sent)],
        "sent_bytes": sent_attention_bytes(plan, shape, recipe, rank=0, recomputed=recomputed_blocks(job, plan)),
        "fullest_share": max((fullest_share(partition, each, context.head_ranks) for each in visible), default=1.0),
    }


def _what_is_sent(comm: AttentionComm) -> tuple[object, ...]:
    return comm.forward, comm.backward, comm.forward_bytes, comm.backward_bytes


def _entry(alike: list[AttentionComm]) -> dict[str, Any]:
    names = ("forward", "backward", "forward_bytes", "backward_bytes", "ranks")
    return {"modules": [each.module for each in alike], **{name: getattr(alike[0], name) for name in names}}


def attention_lines(report: dict[str, Any]) -> Iterator[OutputLine]:
    """The report as a table of calls, with the bytes of a micro-batch."""
    yield f"inside of attention, in a micro-batch ({report['kind']}, {report['order']})"
    rows = []
    for each in report["calls"]:
        modules = " ... ".join(dict.fromkeys((each["modules"][0], each["modules"][-1])))
        sizes = (
            f"{format_bytes(each[f'{way}_bytes'])} by {' and '.join(each[way])}" for way in ("forward", "backward")
        )
        rows.append((modules, str(len(each["modules"])), *sizes))
    yield from table_lines(rows, header=("modules", "calls", "rank 0 sends in forward", "in backward"))


def attention_sentence(report: dict[str, Any]) -> str:
    """The bytes of a step, and the work of the fullest rank."""
    return (
        f"Inside of attention it sends {format_bytes(report['sent_bytes'])} in a step as well; the rank with the most "
        f"pairs of query and key has {report['fullest_share']:.2f} times the mean."
    )
