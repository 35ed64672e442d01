"""Refusals of context parallelism that need settings and the sizes of a model alone, before ranks start."""

from collections.abc import Sequence

from motet.core.errors import check_input
from motet.models.spec.layer_specs import AttentionSpec, MicroBatchShape
from motet.parallel.layout import Layout


def check_context_sequence(layout: Layout, shape: MicroBatchShape, *, setting: str) -> None:
    """Refuse sequences that have a source, or fewer than two tokens for each rank. `setting` has their length."""
    ranks, fewest = layout.cp, 2 * layout.cp
    check_input(
        ranks == 1 or not shape.source_length,
        f"layout.cp = {ranks} splits one sequence over ranks, but an encoder-decoder reads a source besides its "
        "tokens; leave layout.cp out",
    )
    most = f", or layout.cp={shape.length // 2} at most" * (shape.length >= 4)
    check_input(
        ranks == 1 or shape.length >= fewest,
        f"{setting} = {shape.length} is less than two tokens for each of layout.cp = {ranks} ranks; use "
        f"{setting}={fewest} or more{most}",
    )


def check_context_heads(layout: Layout, attention: Sequence[AttentionSpec]) -> None:
    """Refuse an all-to-all over more ranks than there are query heads in one of the calls of attention, as a rank of
    tensor parallelism computes them."""
    ranks, is_inner = layout.context.head_ranks, layout.cp_kind != "all-to-all"
    setting = "cp_inner" if is_inner else "cp_kind = 'all-to-all' with layout.cp"
    heads = min((each.heads for each in attention), default=ranks)
    where = f" on each of layout.tp = {layout.tp} ranks" * (layout.tp > 1)
    check_input(
        heads >= ranks or layout.cp == 1,
        f"layout.{setting} = {ranks} gives each rank some of the query heads, of which the model has {heads}{where}; "
        f"use {heads} ranks at most, or layout.cp_kind=all-gather",
    )
