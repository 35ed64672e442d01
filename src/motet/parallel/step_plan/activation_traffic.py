"""The collectives with which tensor-parallel ranks communicate activations in a step, and the bytes that a rank sends.

They are read from the boundary comms of a `ModelSharding`, which the hooks of a run execute, and from the loss.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Literal

from motet.cluster.cluster import Cluster
from motet.collectives.cost.alpha_beta import RankGroups, estimate_cost
from motet.collectives.execute.slot_plan import HostOfRank, backend_sent_bytes, select_program
from motet.core.dtypes import DTYPE_BYTES
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.model_sharding import LOSS, BoundaryComm, BoundaryOperation
from motet.parallel.rank_placement import stages_of_rank
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.step_plan.traffic import StepTrafficBytes
from motet.precision.recipe import PrecisionRecipe

ActivationCollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter"]
_COLLECTIVES: Mapping[BoundaryOperation, ActivationCollectiveName] = {
    "sum": "all-reduce",
    "gather": "all-gather",
    "replicate": "all-gather",
    "scatter": "reduce-scatter",
}  # Of the other operations, each rank does its part alone


@dataclass(frozen=True)
class ActivationCollective:
    """A collective of a micro-batch."""

    collective: ActivationCollectiveName
    module: str
    moment: Literal["forward", "backward"]
    over: str
    numel: int  # Of the activation on all ranks together
    dtype: str


def activation_collectives(
    plan: StepPlan, shape: MicroBatchShape, recipe: PrecisionRecipe, *, rank: int | None = None
) -> tuple[ActivationCollective, ...]:
    """The collectives of a micro-batch of this shape, forward before backward; only those of a rank, if it is given."""
    trained = {name for tensor in plan.inventory.trained for name in (tensor.name, *tensor.aliases)}
    comms = plan.model_sharding.boundary_comms if rank is None else _comms_on_rank(plan, rank)
    made = [each for comm in comms for each in _of_comm(comm, trained, shape=shape, dtype=recipe.compute)]
    on_several_ranks = (each for each in made if plan.dims.size(each.over) > 1)
    return tuple(sorted(on_several_ranks, key=lambda each: each.moment == "backward"))


def _comms_on_rank(plan: StepPlan, rank: int) -> Iterator[BoundaryComm]:
    """The communication of modules that one of the stages of a rank calls."""
    sharding, stages = plan.model_sharding, stages_of_rank(plan, rank)
    heads = {each.module for each in sharding.boundary_comms if each.argument == LOSS}
    blocks = {name: block for block, name in reversed([*enumerate(sharding.block_names)])}

    def is_called(module: str) -> bool:
        if not stages or module in heads:
            return not stages or len(sharding.stages) - 1 in stages
        around = [blocks[name] for name in accumulate(module.split("."), "{}.{}".format) if name in blocks]
        if around:
            return any(min(around) in sharding.stages[stage] for stage in stages)
        inside = [tensor.name for tensor in plan.inventory.tensors if tensor.name.startswith(f"{module}.")]
        return not inside or any(rank in plan.specs[name] for name in inside)

    return (comm for comm in sharding.boundary_comms if is_called(comm.module))


def _of_comm(
    comm: BoundaryComm, trained: set[str], *, shape: MicroBatchShape, dtype: str
) -> Iterator[ActivationCollective]:
    if comm.argument == LOSS and dtype != "float64":
        dtype = "float32"
    # Layers keep the part that a rank has of their input, and gather it again for the gradients of their weights.
    weights = {f"{layer}.{name}" for layer in (comm.module, *comm.shared_by) for name in ("weight", "adapter_a")}
    gathers_again = (comm.operation, comm.side) == ("gather", "input") and not trained.isdisjoint(weights)
    for size in comm.sizes:
        of_call = partial(
            ActivationCollective,
            module=comm.module,
            over=comm.over,
            numel=size.width * shape.count(size.per),
            dtype=dtype,
        )
        if forward := _COLLECTIVES.get(comm.operation):
            yield of_call(forward, moment="forward")
        if gathers_again:
            yield of_call("all-gather", moment="backward")
        if (backward := _COLLECTIVES.get(comm.conjugate)) and size.needs_gradient:
            yield of_call(backward, moment="backward")


def sent_activation_bytes(
    plan: StepPlan, shape: MicroBatchShape, recipe: PrecisionRecipe, *, rank: int, hosts: HostOfRank | None = None
) -> StepTrafficBytes:
    """Bytes of a rank in a step whose micro-batches have this shape, by the backend `motet`; None: all share a host."""
    sent = {"reduce_scatter": 0, "all_reduce": 0, "all_gather": 0}
    for each in activation_collectives(plan, shape, recipe, rank=rank):
        ranks = plan.dims.group_of(rank, each.over)
        numel = each.numel if each.collective == "all-reduce" else each.numel // len(ranks)
        sent[each.collective.replace("-", "_")] += plan.microbatches * backend_sent_bytes(
            each.collective,
            numel,
            each.dtype,
            rank=ranks.index(rank),
            hosts=tuple((hosts or (0,) * plan.dims.ranks)[other] for other in ranks),
        )
    return StepTrafficBytes(**sent)


def traffic_between_hosts(
    collectives: Iterable[ActivationCollective],
    rank_groups: RankGroups,
    *,
    hosts: HostOfRank,
    cluster: Cluster | None = None,
) -> tuple[int, float]:
    """(Bytes that the ranks of a group that spans hosts send from one to another, seconds of all groups on a cluster).

    The algorithms are those of the backend `motet`. Without a cluster there are no seconds.
    """
    counts = Counter((each.collective, DTYPE_BYTES[each.dtype] * each.numel) for each in collectives)
    ranks = next(ranks for ranks in rank_groups if len({hosts[rank] for rank in ranks}) > 1)
    sent, seconds = Fraction(0), Fraction(0)
    for (collective, size), times in counts.items():
        program = select_program(collective, tuple(hosts[rank] for rank in ranks), is_small=False, root=0)
        crossing = (t for step in program.steps for t in step if hosts[ranks[t.src]] != hosts[ranks[t.dst]])
        sent += times * size * Fraction(sum(map(program.relative_size, crossing)), program.message_size_units)
        seconds += times * Fraction(estimate_cost(program, cluster, rank_groups).seconds(size)) if cluster else 0
    return round(sent), float(seconds)
