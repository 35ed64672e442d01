"""The split of a built-in decoder as Megatron has it, written down by name: plans of sizes that no proof runs at."""

from dataclasses import replace

from motet.models.spec.model_spec import spec_from_settings
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import (
    LOSS,
    ActivationSize,
    BoundaryComm,
    BoundaryOperation,
    BoundarySide,
    DimensionSplit,
    ModelInventory,
    ModelSharding,
    ShardRule,
    inventory_of_spec,
)
from motet.parallel.pipeline.stage_wires import StageWire
from motet.train.job import Job
from motet.train.job_step_plan import predicted_stages


def megatron_split(job: Job, layout: Layout) -> tuple[ModelInventory, ModelSharding]:
    """Columns, rows and the vocabulary over `tp`, stages over `pp`; for `family = "decoder"`, gated and untied."""
    model, inventory = job.model, inventory_of_spec(spec_from_settings(job.model))
    head, width = model.hidden // model.heads, model.hidden
    columns = {
        "attention.qkv.weight": (model.heads * head, model.kv_heads * head, model.kv_heads * head),
        "ffn.up.weight": (model.ffn_hidden, model.ffn_hidden),
    }
    units, rows = {"attention.qkv.weight": head}, ("attention.output.weight", "ffn.down.weight")
    rules, comms = dict[str, ShardRule](), list[BoundaryComm]()

    def comm(module: str, side: BoundarySide, operation: BoundaryOperation, argument: int | str = 0) -> None:
        size = ActivationSize(1 if argument == LOSS else width)
        comms.append(BoundaryComm(module, side, argument, operation, "tp", sizes=(size,)))

    for tensor in inventory.tensors if layout.dims.size("tp") > 1 else ():
        module, suffix = tensor.name.rpartition(".")[0], tensor.name.split(".", 2)[-1]
        if tensor.name in ("embedding.weight", "head.weight"):
            rules[tensor.name] = ShardRule((DimensionSplit(0, "tp"),), reason="vocabulary")
            comm(module, *(("output", "sum") if module == "embedding" else ("input", "copy")))
        elif parts := columns.get(suffix):
            split = DimensionSplit(0, "tp", parts, units.get(suffix, 1))
            rules[tensor.name] = ShardRule((split,), reason="columns")
            comm(module, "input", "copy")
        elif suffix in rows:
            rules[tensor.name] = ShardRule((DimensionSplit(1, "tp", unit=units.get(suffix, 1)),), reason="rows")
            comm(module, "output", "sum")
    if comms:
        comm("", "output", "sum", LOSS)
    staged = predicted_stages(job, layout)
    wire = StageWire(0, ("rows", "tokens", width), job.precision.resolved.compute)
    wires = ((wire,),) * max(0, len(staged.stages) - 1)
    return inventory, replace(staged, rules=rules, boundary_comms=tuple(comms), wires=wires)
