"""A small decoder as values: its inventory, and how tensor parallelism, pipelines and sequence sharding split it."""

from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory, TensorInfo
from motet.parallel.model_sharding import ActivationSplit, BoundaryComm, DimensionSplit, ModelSharding, ShardRule
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.sharding_check import ShardedStep, make_sharded_step

BLOCKS = 3
BLOCK_SHAPES = {
    "norm.weight": (8,),
    "attn.q.weight": (16, 8),
    "attn.kv.weight": (16, 8),  # A key and a value of two heads each
    "attn.q_norm.weight": (4,),
    "attn.out.weight": (8, 16),
    "attn.out.bias": (8,),
    "mlp.up.weight": (24, 8),
    "mlp.down.weight": (8, 24),
}


def inventory() -> ModelInventory:
    tensors = [TensorInfo("embed.weight", (10, 8), "float32", "trained", aliases=("head.weight",))]
    for block in range(BLOCKS):
        for name, shape in BLOCK_SHAPES.items():
            tensors.append(TensorInfo(f"blocks.{block}.{name}", shape, "float32", "trained", block=block))
        tensors.append(TensorInfo(f"blocks.{block}.angles", (6,), "float32", "table", block=block))
    return ModelInventory((*tensors, TensorInfo("norm.weight", (8,), "float32", "trained")))


def model_sharding(*, stages: tuple[range, ...] = (), sequence: bool = False) -> ModelSharding:
    """The rules as Megatron has them; with `sequence`, activations between regions are split along positions."""
    everywhere = ("dp", "cp", "tp")
    unsplit = ShardRule(partial_over=everywhere, reason="sequence") if sequence else ShardRule()
    of_block = {
        "norm.weight": unsplit,
        "attn.q.weight": ShardRule((DimensionSplit(0, "tp", unit=4),), reason="column"),
        "attn.kv.weight": ShardRule((DimensionSplit(0, "tp", (8, 8), unit=4),), everywhere, "shared key and value"),
        "attn.q_norm.weight": ShardRule(partial_over=everywhere, reason="norm of each head"),
        "attn.out.weight": ShardRule((DimensionSplit(1, "tp", unit=4),), reason="row"),
        "attn.out.bias": unsplit,
        "mlp.up.weight": ShardRule((DimensionSplit(0, "tp", (12, 12)),), reason="gate and up"),
        "mlp.down.weight": ShardRule((DimensionSplit(1, "tp"),), reason="row"),
    }
    open_, close = ("gather", "scatter") if sequence else ("copy", "sum")
    comms = [BoundaryComm("embed", "input", 0, "copy", "tp"), BoundaryComm("embed", "output", 0, close, "tp", 1)]
    lies = ((1, "tp"),) if sequence else ()
    activations = [ActivationSplit("norm", "input", lies)]
    for block in (f"blocks.{number}" for number in range(BLOCKS)):
        for region, last in (("attn", "attn.out"), ("mlp", "mlp.down")):
            comms.append(BoundaryComm(f"{block}.{region}", "input", 0, open_, "tp", 1))
            comms.append(BoundaryComm(f"{block}.{last}", "output", 0, close, "tp", 1))
        activations += [ActivationSplit(block, "input", lies), ActivationSplit(block, "output", lies)]
        activations.append(ActivationSplit(f"{block}.attn.q_norm", "input", ((2, "tp"),)))
    comms += [BoundaryComm("head", "input", 0, open_, "tp", 1), BoundaryComm("loss", "output", 0, "sum", "tp")]
    rules = {f"blocks.{b}.{name}": rule for b in range(BLOCKS) for name, rule in of_block.items()}
    rules |= {"embed.weight": ShardRule((DimensionSplit(0, "tp"),), reason="vocabulary"), "norm.weight": unsplit}
    return ModelSharding(rules, tuple(comms), activations=tuple(activations), stages=stages)


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
    dp = dims.size("dp")
    return Layout(dims, DataParallelSharding(dp, 2, zero, dp if zero else 1, min_shard_numel=10))


def sharded_step(name: str, sharding: ModelSharding | None = None) -> ShardedStep:
    """Everything about one of the layouts, with its own split of the model or another."""
    sizes, zero, usual = LAYOUTS[name]
    layout = make_layout(sizes, zero)
    return make_sharded_step(inventory(), sharding or usual, layout, batch_sequences=BATCH_SEQUENCES)
