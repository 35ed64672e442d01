"""Rules of a step plan about the tokens of a row on the ranks of context parallelism, and the keys that reach them.

Parts and schedules follow from the length of a row alone, which a plan does not know. The rules look at short rows of
lengths with different remainders, in which each piece has one token or two.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from motet.core.errors import InputError
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import ring_spans
from motet.parallel.context_parallel.context_partition import ContextPartition, Spans
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import shared_ring_schedule
from motet.parallel.model_sharding import CONTEXT_DIMENSION
from motet.parallel.step_plan.attention_traffic import attention_on_ranks
from motet.parallel.step_plan.plan import StepPlan

_MOST_RANKS = 64  # The schedule of a ring grows with the square of its ranks


def tokens_are_computed_once(plan: StepPlan) -> Iterator[str]:
    """Ranks that share a row have each of its tokens once, in ascending order."""
    for partition in _partitions(plan):
        computed = sorted((token, rank) for rank in range(partition.ranks) for token in _tokens(partition.spans(rank)))
        tokens = [token for token, _ in computed]
        if tokens != [*range(partition.tokens)]:
            for token in range(partition.tokens):
                if (times := tokens.count(token)) != 1:
                    ranks = [rank for other, rank in computed if other == token]
                    yield f"token {token} of a row of {partition.tokens} is computed {times} times, by ranks {ranks}"
            return


def pairs_meet_once(plan: StepPlan) -> Iterator[str]:
    """The key of each visible pair reaches the rank that has its query; that it arrives once follows from the tokens
    of ranks, each of whose keys a rank gets from one owner."""
    if plan.dims.size(CONTEXT_DIMENSION) == 1:
        return
    alike = dict[AttentionCall, AttentionCall]()
    for call in attention_on_ranks(plan):
        alike.setdefault(replace(call, module="", block=None), call)
    for call in alike.values():
        yield from _heads_not_computed_once(plan, call)
        for partition in _partitions(plan):
            windows = (None,) if call.window is None else (1, partition.ranks, partition.tokens)
            for visible in (PlaceVisibility(call.causal, window) for window in windows):
                yield from _missing_keys(plan, call, partition, visible=visible)


def _partitions(plan: StepPlan) -> Iterator[ContextPartition]:
    ranks = plan.dims.size(CONTEXT_DIMENSION)
    yield from (plan.context.partition(length) for length in {2 * ranks, 2 * ranks + 1, 4 * ranks - 1} if ranks > 1)


def _tokens(spans: Spans) -> Iterator[int]:
    return (token for span in spans for token in range(*span))


def _heads_not_computed_once(plan: StepPlan, call: AttentionCall) -> Iterator[str]:
    try:
        split = HeadSplit(call.query_heads, call.key_heads, plan.context.head_ranks)
    except InputError as error:
        yield f"{call.module}: {error}"
        return
    holders = [(head, rank) for rank in range(split.ranks) for head in range(*split.queries(rank))]
    if [head for head, _ in holders] != [*range(call.query_heads)]:
        yield f"{call.module}: {split.ranks} ranks compute its query heads as {holders}, not each of them once"
    for head, rank in holders:
        if head // split.group not in range(*split.keys(rank)):
            yield f"{call.module}: rank {rank} computes query head {head} without its key head {head // split.group}"


def _missing_keys(
    plan: StepPlan, call: AttentionCall, partition: ContextPartition, *, visible: PlaceVisibility
) -> Iterator[str]:
    parts = ring_spans(partition, plan.context.head_ranks)
    if len(parts) > _MOST_RANKS:
        return
    arriving = _arriving_keys(plan, parts, visible)
    for rank, queries in enumerate(parts):
        keys = sorted(span for owner in range(len(parts)) for span in arriving(owner, rank))
        for query in _tokens(queries):
            stop = query + 1 if visible.causal else partition.tokens
            first = 0 if visible.window is None else max(0, query + 1 - visible.window)
            reached = sum(max(0, min(stop, b) - max(first, a)) for a, b in keys)
            if reached != stop - first:
                yield (
                    f"{call.module}: {reached} keys reach the query of token {query} of {partition.tokens} on rank "
                    f"{rank} of {len(parts)}, which sees {stop - first}"
                )
                return


def _arriving_keys(plan: StepPlan, parts: tuple[Spans, ...], visible: PlaceVisibility) -> Callable[[int, int], Spans]:
    """The keys of an owner that reach a rank, which only has keys to send on that reached it."""
    if plan.context.kind != "ring":
        return lambda owner, rank: parts[owner]
    schedule, ranks = shared_ring_schedule(parts, visible), len(parts)
    by_owner = []
    for owner, keys in enumerate(parts):
        reached = [keys]
        for hop in range(1, ranks):
            sent = zip(reached[-1], schedule.keys_in_hop(owner, hop), strict=True)
            reached.append(tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in sent))
        by_owner.append(reached)
    return lambda owner, rank: by_owner[owner][(rank - owner) % ranks]


CONTEXT_RULES: tuple[Callable[[StepPlan], Iterator[str]], ...] = (tokens_are_computed_once, pairs_meet_once)
