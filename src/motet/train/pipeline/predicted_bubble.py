"""A warning of a pipeline whose ranks will wait for much of a step, with the micro-batches that would halve it."""

from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline
from motet.parallel.pipeline.schedules import SCHEDULES

MAX_BUBBLE_SHARE = 0.25


def bubble_share(layout: Layout, microbatches: int) -> float:
    """The share of a step in which ranks wait, where all stages take the same time and messages take none."""
    return ScheduleTimeline(layout.pipeline_schedule(microbatches)).bubble_share()


def bubble_warning(layout: Layout, batch_sequences: int) -> str:
    """A sentence, or nothing if the ranks are predicted to be busy."""
    ranks, microbatches = layout.dims.size(PIPELINE_DIMENSION), layout.sharding.microbatches
    share = bubble_share(layout, microbatches) if ranks > 1 else 0.0
    if share <= MAX_BUBBLE_SHARE:
        return ""
    count = f"{microbatches} micro-batch{'es' * (microbatches > 1)}"
    return (
        f"the ranks of the pipeline will wait for {share:.1%} of a step, if stages take the same time: "
        f"layout.schedule = {layout.schedule!r} with {count} over layout.pp = {ranks}; "
        f"{_remedy(layout, batch_sequences, share)}"
    )


def _remedy(layout: Layout, batch_sequences: int, share: float) -> str:
    """The remedy that halves the bubble: more micro-batches of the same batch, or else of a larger one."""
    if layout.schedule not in SCHEDULES:
        return "a file with more micro-batches would have less of it"
    data_ranks, count = layout.data_ranks, _fewest_microbatches(layout, share / 2, share)
    if not count:
        return "another schedule may have less of it"
    rows = batch_sequences // data_ranks
    count = next((divisor for divisor in range(count, rows + 1) if rows % divisor == 0), count)
    words = [f"layout.microbatches={count}"] if layout.sharding.reproducible_batch_size is None else []
    if rows % count or not words:
        words.append(f"data.batch_sequences={-(-batch_sequences // (count * data_ranks)) * count * data_ranks}")
    return f"{' and '.join(words)} would halve that"


def _fewest_microbatches(layout: Layout, share: float, now: float) -> int:
    """The fewest micro-batches whose bubble is not above a share, or 0, where it is `now` with those of the layout.

    The search starts where the share would be if the idle time did not depend on the number of micro-batches.
    """
    microbatches = layout.sharding.microbatches
    start = max(microbatches, round(microbatches * now / (1 - now) * (1 - share) / share))
    count = next((n for n in range(start, 2 * start + 2) if bubble_share(layout, n) <= share), 0)
    while count > microbatches + 1 and bubble_share(layout, count - 1) <= share:
        count -= 1
    return count
