"""The plan of a step of a job, without torch.

The costs of splitting layers beyond what it saves: warnings before training, and in `motet show layout`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from motet.cluster.cluster import Cluster
from motet.core.errors import InputError
from motet.core.units import format_bytes, format_duration
from motet.memory.policy_choice import fixed_policies
from motet.models.settings import UserModuleSettings
from motet.models.spec.layer_specs import BlockPolicy
from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.data_parallel.communication.communication_settings import communication_cluster
from motet.parallel.layout import Layout, parse_stages
from motet.parallel.model_sharding import (
    PIPELINE_DIMENSION,
    TENSOR_DIMENSION,
    ModelInventory,
    ModelSharding,
    ShardRule,
    inventory_of_spec,
)
from motet.parallel.pipeline.stages.stage_balance import balance_stages, check_stages, costs_of_spec
from motet.parallel.roles_of_tensors import (
    flops_of_weights,
    repeated_parameters,
    repeated_products,
    tensor_roles,
)
from motet.parallel.step_plan.attention_traffic import attention_of_spec
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.step_plan.traffic import activation_collectives, traffic_between_hosts
from motet.train.job import Job, batch_shape
from motet.train.proof.proof_cache import keep_proof_of_job, read_proof_of_job


def step_plan_of_job(
    job: Job, layout: Layout, inventory: ModelInventory | None = None, *, model_sharding: ModelSharding | None = None
) -> StepPlan:
    """The plan of a model with known sizes; by default all parameters are trained, and none is split. Without a proof,
    its calls of attention follow from the sizes."""
    model_sharding = model_sharding or ModelSharding()
    if layout.cuts_rows and not model_sharding.attention and not isinstance(job.model, UserModuleSettings):
        model_sharding = replace(model_sharding, attention=attention_of_spec(spec_from_settings(job.model)))
    return make_step_plan(
        inventory or inventory_of_spec(spec_from_settings(job.model)),
        layout,
        job.precision.resolved,
        settings=job.communication,
        batch_sequences=job.data.batch_sequences,
        independent_replicas=job.outer.every is not None,
        model_sharding=model_sharding,
        places=job.memory.places,
    )


def step_plan_of_split_job(job: Job, layout: Layout) -> StepPlan:
    """The plan of a job whose layers, blocks or rows ranks may split.

    The split is proven on the job's module, with torch, unless an earlier run with the same job has kept the proof.
    """
    has_known_calls = not layout.cuts_rows or not isinstance(job.model, UserModuleSettings)
    if layout.dims.size(TENSOR_DIMENSION, PIPELINE_DIMENSION) == 1 and has_known_calls:
        return step_plan_of_job(job, layout)
    if (known := read_proof_of_job(job, layout)) is not None:
        inventory, sharding = known
    else:
        from motet.train.proof.proposed_sharding import sharding_of_job

        inventory, sharding = sharding_of_job(job, layout)
        keep_proof_of_job(job, layout, inventory=inventory, sharding=sharding)
    return step_plan_of_job(job, layout, inventory, model_sharding=sharding)


def block_policies(job: Job, plan: StepPlan) -> tuple[BlockPolicy, ...]:
    """The recomputation of each block."""
    return fixed_policies(job.memory, 1 + max((tensor.block or 0 for tensor in plan.inventory.tensors), default=0))


def recomputed_blocks(job: Job, plan: StepPlan) -> set[int]:
    """The blocks whose forward a backward computes again."""
    return blocks_computed_again(block_policies(job, plan))


def blocks_computed_again(policies: Sequence[BlockPolicy]) -> set[int]:
    """The blocks of which these policies keep less than all."""
    return {block for block, policy in enumerate(policies) if policy != "none"}


def predicted_stages(job: Job, layout: Layout) -> ModelSharding:
    """The stages of a model with known sizes, without the tensors that cross their borders; none without a pipeline.

    A tensor of several stages, such as tied embeddings, counts in the first of them.
    """
    if layout.dims.size(PIPELINE_DIMENSION) == 1:
        return ModelSharding()
    stage_ranks = layout.pipeline_schedule(layout.sharding.microbatches).stage_ranks
    costs = costs_of_spec(spec_from_settings(job.model), batch_shape(job, 1), job.precision.resolved.compute)
    cuts = job.layout.stages
    stages = balance_stages(costs, len(stage_ranks)) if cuts is None else parse_stages(cuts)
    check_stages(stages, len(costs.times), f"the model of job {job.name!r}")
    return ModelSharding(stages=stages, stage_ranks=stage_ranks)


def split_warnings(job: Job, plan: StepPlan, local_ranks: int = 0, *, cluster: Cluster | None = None) -> Iterator[str]:
    """A sentence for each thing that the split of a job's layers costs; `local_ranks` share a host."""
    if plan.dims.size(TENSOR_DIMENSION) > 1:
        yield whole_layers_warning(job, plan)
        yield between_hosts_warning(job, plan, local_ranks, cluster=cluster)
    if cluster is not None:
        yield shard_groups_warning(plan, cluster)


def shard_groups_warning(plan: StepPlan, cluster: Cluster) -> str:
    """A sentence about ranks that shard one copy but lie on several hosts, or nothing."""
    local = cluster.devices_per_host
    for group in (each.group for each in plan.groups):
        shards = group.sharding.shards
        for ranks in group.sum_groups if shards > 1 and len(group.stages) == 1 else ():
            first = ranks[:shards]
            inside = sum(rank // local == first[0] // local for rank in first)
            if inside < shards:
                fitting = max(size for size in range(1, inside + 1) if shards % size == 0)
                return (
                    f"layout.zero = {group.sharding.zero}: ranks {' '.join(map(str, first))} share one copy, but lie "
                    f"on several hosts of {local} devices. Use layout.shard_group={fitting} to stay inside of a host."
                )
    return ""


def whole_layers_warning(job: Job, plan: StepPlan) -> str:
    """A sentence about layers that could not be split, or nothing."""
    by_reason: dict[str, list[str]] = {}
    for role in tensor_roles(plan.inventory, plan.model_sharding, plan.dims):
        if role.repeats_work and len(role.shape) > 1 and role.reason != ShardRule().reason:
            by_reason.setdefault(role.reason, []).append(role.name)
    layers = "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({reason})"
        for reason, names in by_reason.items()
    )
    degree = plan.dims.size(TENSOR_DIMENSION)
    return f"layout.tp = {degree} leaves layers whole: {layers}. {describe_repeated_work(job, plan)}" if layers else ""


def between_hosts_warning(job: Job, plan: StepPlan, local_ranks: int = 0, *, cluster: Cluster | None = None) -> str:
    """A sentence about tensor-parallel ranks that lie on several hosts, or nothing.

    The devices of a host are those of a cluster, by default `communication.cluster`, or else the local ranks.
    """
    source, rank_groups = job.communication.cluster, plan.dims.groups(TENSOR_DIMENSION)
    cluster = cluster or (communication_cluster(source, plan.dims.ranks) if source else None)
    devices = cluster.devices_per_host if cluster else local_ranks or plan.dims.ranks
    hosts = tuple(rank // devices for rank in range(plan.dims.ranks))
    ranks = next((ranks for ranks in rank_groups if len({hosts[rank] for rank in ranks}) > 1), ())
    if not ranks:
        return ""
    shape = batch_shape(job, len(plan.rows_by_rank[0][0]))
    policies = block_policies(job, plan)
    collectives = (
        activation_collectives(plan, shape, job.precision.resolved, rank=ranks[0], policies=policies)
        * plan.microbatches
    )
    sent, seconds = traffic_between_hosts(collectives, rank_groups, hosts=hosts, cluster=cluster)
    cost = "set communication.cluster to predict its time"
    if cluster is not None:
        cost = f"and all communication of activations takes {format_duration(seconds)} on {cluster.name}"
    fitting = max(size for size in range(1, len(ranks)) if devices % size == 0)
    return (
        f"layout.tp = {len(ranks)}: ranks {' '.join(map(str, ranks))} split layers, but lie on several hosts of "
        f"{devices} devices. In a step they send {format_bytes(sent)} of activations between hosts, {cost}. Use "
        f"layout.tp={fitting} to stay inside of a host."
    )


def repeated_work(job: Job, plan: StepPlan) -> dict[str, float]:
    """The fractions of the parameters, and of the FLOPs of products with weights, that every rank has unsplit."""
    try:
        flops = flops_of_weights(spec_from_settings(job.model), batch_shape(job, 1))
    except InputError:  # The sizes of the products are not known
        flops = {}
    return {
        "parameters": repeated_parameters(plan.inventory, plan.model_sharding),
        "products": repeated_products(plan.inventory, plan.model_sharding, flops),
    }


def describe_repeated_work(job: Job, plan: StepPlan) -> str:
    """A sentence with the fractions of repeated work."""
    parameters, products = repeated_work(job, plan).values()
    return (
        f"Every tensor-parallel rank holds {parameters:.1%} of the parameters as a whole, and repeats {products:.1%} "
        "of the FLOPs of products with weights."
    )
