"""The graph of a data-parallel step of a job: model segments, messages, and the time of each node, without torch."""

from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import make_buckets
from motet.parallel.step_plan.timeline import (
    CommUnitVolume,
    ModelSegment,
    TimelineNode,
    build_step_graph,
    compute_node_times,
)
from motet.train.flops import batch_shape
from motet.train.job import Job


def step_timeline(
    job: Job, sharding: DataParallelSharding, communication: float
) -> tuple[tuple[TimelineNode, ...], dict[str, tuple[float, float]]]:
    """The graph, and the start and stop of each node, in units of the time to compute a step."""
    segments, messages = layers_and_messages(job, sharding)
    nodes = build_step_graph(segments, messages, sharding, settings=job.communication)
    flops = 3 * sum(segment.flops for segment in segments) * sharding.microbatches
    # An all-reduce moves this, times (N - 1) / N.
    reduce_bytes = DTYPE_BYTES[job.precision.resolved.reduce]
    all_reduce_bytes = 2.0 * reduce_bytes * spec_from_settings(job.model).parameter_count
    rates = {"compute": 1 / flops, "network": communication / all_reduce_bytes}
    return nodes, compute_node_times(nodes, lambda node: node.work * rates[node.resource])


def layers_and_messages(job: Job, sharding: DataParallelSharding) -> tuple[list[ModelSegment], list[CommUnitVolume]]:
    """A segment for each repetition of each block of the model, and the messages of a step."""
    shape = batch_shape(job, sharding.rows_per_microbatch(job.data.batch_sequences))
    segments, sizes, blocks = list[ModelSegment](), dict[str, int](), set[str]()
    for block in spec_from_settings(job.model).blocks:
        parameters = list(block.named_parameters())
        count = len(parameters) // block.repeat
        for i in range(block.repeat):
            name = block.name if block.repeat == 1 else f"{block.name} {block.first_index + i}"
            segment_sizes = {p.name: p.numel for p in parameters[i * count : (i + 1) * count]}
            segments.append(ModelSegment(name, block.forward_flops(shape), frozenset(segment_sizes)))
            sizes |= segment_sizes
            blocks |= {name} if block.repeat > 1 else set()
    if sharding.zero == 3:
        return segments, _fsdp_unit_messages(job, segments, sizes, blocks=blocks)
    return segments, _bucket_messages(job, sharding, sizes)


def _bucket_messages(job: Job, sharding: DataParallelSharding, sizes: dict[str, int]) -> list[CommUnitVolume]:
    recipe, members = job.precision.resolved, {name: (0, size) for name, size in sizes.items()}
    reduced = DTYPE_BYTES[recipe.reduce]
    gathered = reduced if sharding.zero == 0 else DTYPE_BYTES[recipe.compute]
    buckets = make_buckets(members, sharding, recipe, settings=job.communication)
    return [
        CommUnitVolume(f"bucket {i}", frozenset(m.name for m in b.members), reduced * b.length, gathered * b.length)
        for i, b in enumerate(buckets)
    ]


def _fsdp_unit_messages(
    job: Job, segments: list[ModelSegment], sizes: dict[str, int], *, blocks: set[str]
) -> list[CommUnitVolume]:
    recipe = job.precision.resolved
    others = frozenset[str]().union(*(s.parameters for s in segments if s.name not in blocks))
    units = [(s.name, s.parameters, True) for s in reversed(segments) if s.name in blocks]
    counted = [(*unit, sum(sizes[name] for name in unit[1])) for unit in [*units, ("the rest", others, False)]]
    reduced, gathered = DTYPE_BYTES[recipe.reduce], DTYPE_BYTES[recipe.compute]
    return [CommUnitVolume(name, p, reduced * n, gathered * n, is_block) for name, p, is_block, n in counted]
