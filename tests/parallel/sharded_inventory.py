"""A small decoder as values: its inventory, and how tensor parallelism, pipelines and sequence sharding split it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from motet.parallel.data_parallel.comm_units import make_group_plan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import BucketOwners, DataParallelSharding
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import (
    ActivationSplit,
    BoundaryComm,
    DimensionSplit,
    ModelInventory,
    ModelSharding,
    ShardRule,
    TensorInfo,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parallel.sync_groups import SyncGroup
from motet.precision.recipe import RECIPES

BLOCKS = 3
BLOCK_SHAPES = {
    "norm.weight": (8,),
    "attn.q.weight": (16, 8),
    "attn.kv.weight": (16, 8),  # A key and a value of two heads each
    "attn.q_norm.weight": (4,),
    "attn.table.weight": (6, 4),
    "attn.out.weight": (8, 16),
    "attn.out.bias": (8,),
    "mix.weight": (8,),  # It mixes tokens
    "mlp.up.weight": (24, 8),
    "mlp.down.weight": (8, 24),
}


def inventory() -> ModelInventory:
    tensors = [TensorInfo("embed.weight", (10, 8), "float32", "trained", aliases=("head.weight",))]
    for block in range(BLOCKS):
        for name, shape in BLOCK_SHAPES.items():
            tensors.append(
                TensorInfo(f"blocks.{block}.{name}", shape, "float32", "trained", int(len(shape) == 1), block=block)
            )
        tensors.append(TensorInfo(f"blocks.{block}.angles", (6,), "float32", "table", block=block))
    return ModelInventory((*tensors, TensorInfo("norm.weight", (8,), "float32", "trained")))


def model_sharding(*, stages: tuple[range, ...] = (), sequence: bool = False) -> ModelSharding:
    """The rules as Megatron has them; with `sequence`, the stream of the blocks is split along tokens.

    Keys and values of the last block are those of another sequence, which every rank has.
    """
    everywhere = ("dp", "cp", "tp")
    unsplit = ShardRule(partial_over=everywhere, reason="sequence") if sequence else ShardRule()
    block_rules = {
        "norm.weight": unsplit,
        "attn.q.weight": ShardRule((DimensionSplit(0, "tp", unit=4),), reason="column"),
        "attn.kv.weight": ShardRule((DimensionSplit(0, "tp", (8, 8), unit=4),), everywhere, "shared key and value"),
        "attn.q_norm.weight": ShardRule(partial_over=everywhere, reason="norm of each head"),
        "attn.table.weight": ShardRule((DimensionSplit(1, "tp"),), reason="table of each head"),
        "attn.out.weight": ShardRule((DimensionSplit(1, "tp", unit=4),), reason="row"),
        "attn.out.bias": ShardRule(),
        "mlp.up.weight": ShardRule((DimensionSplit(0, "tp", (12, 12)),), reason="gate and up"),
        "mlp.down.weight": ShardRule((DimensionSplit(1, "tp"),), reason="row"),
    }
    lies = (DimensionSplit(1, "tp"),) if sequence else ()
    comms, activations = [BoundaryComm("embed", "output", 0, "sum", "tp")], list[ActivationSplit]()
    for block in (f"blocks.{number}" for number in range(BLOCKS)):
        if sequence and block == "blocks.0":
            comms.append(BoundaryComm(block, "input", 0, "split", "tp", 1))
        is_last = block == f"blocks.{BLOCKS - 1}"  # It gathers what was split
        comms += _comms_of_block(block, sequence=sequence, reads_other=is_last)
        activations += [
            ActivationSplit(block, "input", lies),
            ActivationSplit(block, "output", () if is_last else lies),
        ]
        activations += [ActivationSplit(f"{block}.mix", "input")]
        activations += [ActivationSplit(f"{block}.attn.q_norm", "input", (DimensionSplit(2, "tp"),))]
        activations += [ActivationSplit(f"{block}.attn.table", "input")]
        activations += [ActivationSplit(f"{block}.attn.table", "output", (DimensionSplit(2, "tp"),))]
    comms += [BoundaryComm(block, "output", 0, "gather", "tp", 1)] if sequence else []
    comms += [BoundaryComm("head", "input", 0, "copy", "tp"), BoundaryComm("", "output", "loss", "sum", "tp")]
    rules = {f"blocks.{b}.{name}": rule for b in range(BLOCKS) for name, rule in block_rules.items()}
    rules |= {"embed.weight": ShardRule((DimensionSplit(0, "tp"),), reason="vocabulary")}
    return ModelSharding(rules, tuple(comms), activations=tuple(activations), stages=stages)


def _comms_of_block(block: str, *, sequence: bool, reads_other: bool) -> Iterator[BoundaryComm]:
    comm = partial(BoundaryComm, over="tp", dim=1 if sequence else -1)
    opening = partial(comm, side="input", argument=0, operation="gather" if sequence else "copy")
    closing = partial(comm, side="output", argument=0, operation="scatter" if sequence else "sum")
    if reads_other:
        yield BoundaryComm(f"{block}.attn.kv", "input", 0, "copy", "tp")
        yield opening(f"{block}.attn.q")
    else:
        yield opening(f"{block}.attn.q", shared_by=(f"{block}.attn.kv",))
    yield closing(f"{block}.attn.out")
    if sequence:
        yield comm(f"{block}.mix", "input", 0, "replicate")
        yield comm(f"{block}.mix", "output", 0, "split")
    yield opening(f"{block}.mlp.up")
    yield closing(f"{block}.mlp.down")


STAGES = (range(1), range(1, BLOCKS))
# Layout -> (sizes of the dimensions, stage of ZeRO, how the model is split)
LAYOUTS: dict[str, tuple[dict[str, int], int, ModelSharding]] = {
    "dp=4": ({"dp": 4}, 3, ModelSharding()),
    "tp=2 dp=2": ({"dp": 2, "tp": 2}, 0, model_sharding()),
    "pp=2 dp=2": ({"pp": 2, "dp": 2}, 1, ModelSharding(stages=STAGES)),
    "pp=2 dp=2 tp=2": ({"pp": 2, "dp": 2, "tp": 2}, 3, model_sharding(stages=STAGES)),
    "tp=4 sequence": ({"dp": 1, "tp": 4}, 0, model_sharding(sequence=True)),
}
BATCH_SEQUENCES = 8


def make_layout(sizes: dict[str, int], zero: int) -> Layout:
    dims = ParallelDims(tuple(sizes.items()))
    sizes = {"dp": 1, "cp": 1} | sizes
    ranks, cp = sizes["dp"] * sizes["cp"], sizes["cp"]
    return Layout(dims, DataParallelSharding(ranks, 2, zero, ranks if zero else 1, min_shard_numel=10, ranks_of_row=cp))


class PlanCase(NamedTuple):
    """Whatever a plan is made of, besides the inventory."""

    sizes: dict[str, int]
    sharding: DataParallelSharding
    model: ModelSharding = ModelSharding()
    compress: str | None = None
    has_replicas: bool = False
    overlap: Literal["backward", "forward"] = "backward"

    @property
    def settings(self) -> CommunicationSettings:
        return CommunicationSettings(
            bucket_mib=0.0005, first_bucket_mib=0.0002, compress_gradients=self.compress, overlap=self.overlap
        )


Sharding = partial(DataParallelSharding, microbatches=2, min_shard_numel=10)
OWNERS = BucketOwners(2, 0.0005, "ring", "ring")
PLANS = {
    "dp=4 zero=2": PlanCase({"dp": 4}, Sharding(4, zero=2, shards=4)),
    "tp=2 dp=2 zero=1": PlanCase({"dp": 2, "tp": 2}, Sharding(2, zero=1, shards=2), model_sharding()),
    "pp=2 dp=2 zero=3": PlanCase({"pp": 2, "dp": 2}, Sharding(2, zero=3, shards=2), ModelSharding(stages=STAGES)),
    "tp=2 dp=2 zero=3": PlanCase({"dp": 2, "tp": 2}, Sharding(2, zero=3, shards=2), model_sharding()),
    "tp=2 dp=2 zero=2 int8": PlanCase({"dp": 2, "tp": 2}, Sharding(2, zero=2, shards=2), model_sharding(), "int8"),
    "pp=2 dp=2 tp=2 zero=0": PlanCase({"pp": 2, "dp": 2, "tp": 2}, Sharding(2), model_sharding(stages=STAGES)),
    "tp=4 sequence": PlanCase({"dp": 1, "tp": 4}, Sharding(1), model_sharding(sequence=True)),
    "hybrid": PlanCase({"dp": 4}, Sharding(4, zero=2, shards=2)),
    "secondary shards": PlanCase({"dp": 4}, Sharding(4, zero=3, shards=4, secondary_shards=2), compress="int8"),
    "replicas": PlanCase({"dp": 4}, Sharding(4, zero=1, shards=2), has_replicas=True),
    "owners": PlanCase({"dp": 3}, Sharding(3, zero=1, shards=3, bucket_owners=OWNERS)),
    "forward overlap": PlanCase({"dp": 2}, Sharding(2), overlap="forward"),
}


def make_plan(name: str, model: ModelSharding | None = None) -> StepPlan:
    """The plan of a case, with its own split of the model or another."""
    case = PLANS[name]
    return make_step_plan(
        inventory(),
        Layout(ParallelDims(tuple(case.sizes.items())), case.sharding),
        RECIPES["fp32"],
        settings=case.settings,
        batch_sequences=BATCH_SEQUENCES if case.sizes["dp"] in (1, 2, 4) else 4 * case.sizes["dp"],
        independent_replicas=case.has_replicas,
        model_sharding=model or case.model,
    )


def planned_again(name: str, plan: StepPlan, old: SyncGroup, new: SyncGroup) -> StepPlan:
    """The plan with another sync group, and with the units and actions of that group."""
    coordinates = plan.dims.coordinates(old.sum_groups[0][0])
    specs = {t: plan.model_sharding.spec(t, coordinates, plan.dims) for t in plan.inventory.trained}
    tensors = {tensor.name: (tensor, spec.local_shape) for tensor, spec in specs.items() if spec}
    made = make_group_plan(new, tensors, RECIPES["fp32"], settings=PLANS[name].settings)
    return replace(plan, groups=tuple(made if group.group is old else group for group in plan.groups))
