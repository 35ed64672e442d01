"""The stages of a module together with its split over tensor-parallel ranks, as one value."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from motet.parallel.layout import parse_stages
from motet.parallel.model_sharding import TENSOR_DIMENSION, DimensionSplit, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stage_wires import StageWire
from motet.parallel.pipeline.stages.stage_balance import BYTES_OF_PARAMETER, BlockCosts, balance_stages
from motet.parallel.pipeline.stages.stage_module import describe_sizes
from motet.parallel.pipeline.stages.stage_proof import SizedForward, prove_stages
from motet.parallel.process.module_inventory import inventory_of_module
from motet.parallel.proof.module_calls import record_calls, value_at
from motet.parallel.proof.proof_values import local_parameters, local_values, random_values
from motet.parallel.roles_of_tensors import split_layers
from motet.parallel.tensor_parallel.boundary_hooks import local_input_widths


def propose_stages(
    module: nn.Module,
    forwards: Sequence[SizedForward],
    sharding: ModelSharding,
    *,
    dims: ParallelDims,
    stage_ranks: Sequence[int],
    cuts: str | None = None,
    costs: BlockCosts | None = None,
    prepare: Callable[[], object] | None = None,
) -> ModelSharding:
    """A sharding with proven stages, one for each entry of `stage_ranks`, which is the pipeline rank of a stage.

    `cuts` are blocks of stages as `layout.stages` has them. Otherwise stages take equal time by the costs of the
    blocks, or by their parameters where no costs of this number of blocks are known.
    """

    def cut(names: Sequence[str]) -> Sequence[range]:
        return cut_stages(module, names, len(stage_ranks), cuts=cuts, costs=costs)

    proven = prove_stages(module, forwards, cut, prepare=prepare)
    staged = replace(
        sharding,
        stages=proven.stages,
        stage_ranks=tuple(stage_ranks),
        stage_tensors=proven.stage_tensors,
        wires=proven.wires,
        block_names=proven.block_names,
        block_outputs=proven.block_outputs,
    )
    return with_local_wires(module, forwards, staged, degree=dims.size(TENSOR_DIMENSION))


def cut_stages(
    module: nn.Module, names: Sequence[str], stages: int, *, cuts: str | None = None, costs: BlockCosts | None = None
) -> tuple[range, ...]:
    """The blocks of each stage: those of `cuts`, or of equal costs, or of equally many parameters."""
    if cuts is not None:
        return parse_stages(cuts)
    is_known = costs is not None and len(costs.times) == len(names)
    return balance_stages(costs if costs and is_known else costs_of_parameters(module, names), stages)


def costs_of_parameters(module: nn.Module, names: Sequence[str]) -> BlockCosts:
    """Costs of blocks by their parameters: the elements of matrices other than embedding tables, and all bytes."""
    tables = {module.weight for module in module.modules() if isinstance(module, nn.Embedding)}
    block_of = {p: i for i, name in enumerate(names) for p in module.get_submodule(name).parameters()}
    parameters, times, memory = dict(module.named_parameters()), [0.0] * len(names), [0.0] * len(names)
    for tensor in (tensor for tensor in inventory_of_module(module, {}).tensors if tensor.name in parameters):
        parameter = parameters[tensor.name]
        after = -1 in tensor.needed_with_blocks
        block = block_of.get(parameter, -1 if after else 0)
        memory[block] += parameter.numel() * BYTES_OF_PARAMETER
        times[block] += parameter.numel() * (parameter.ndim > 1 and (after or parameter not in tables))
    return BlockCosts(tuple(times), tuple(memory))


def with_local_wires(
    module: nn.Module, forwards: Sequence[SizedForward], sharding: ModelSharding, *, degree: int
) -> ModelSharding:
    """The same sharding, whose wires have the shapes of one of `degree` tensor-parallel ranks.

    Forwards with the weights of one rank show the tensors that are split by heads; their values do not matter.
    """
    if degree == 1:
        return sharding
    streams = _split_streams(sharding)

    def change(wire: StageWire, block: int, tensors: Sequence[Tensor]) -> StageWire:
        sizes = list(describe_sizes([tensor.shape for tensor in tensors], [each.sizes for each in forwards]))
        for split_dim in (dim for inside, at, dim in streams if block in inside and wire.place == (at,)):
            sizes[split_dim] = f"{sizes[split_dim]} / {degree}"
        return replace(wire, dims=tuple(sizes), is_replicated=tuple(sizes) == wire.dims)

    with random_values(module):
        local = local_parameters(module, _splits_before_head(module, sharding), ranks=degree, index=0)
        with local_values(module, local, sharding.attributes), local_input_widths(module, sharding.input_widths):
            return _with_changed_wires(module, [each.forward for each in forwards], sharding, change=change)


def with_wire_dtypes(
    module: nn.Module, forward: Callable[[], Tensor], sharding: ModelSharding, *, compute: torch.dtype
) -> ModelSharding:
    """The same sharding, whose wires say where activations are in another dtype than parameters, which have `compute`.

    Many models compute norms or biases in float32 whatever dtype they have. In float64 that does not show.
    """
    if compute == torch.float64:
        return sharding

    def change(wire: StageWire, _: int, tensors: Sequence[Tensor]) -> StageWire:
        dtype = tensors[0].dtype
        return replace(wire, dtype="compute" if dtype == compute else str(dtype).removeprefix("torch."))

    with random_values(module, compute):
        return _with_changed_wires(module, [forward], sharding, change=change)


def _with_changed_wires(
    module: nn.Module,
    forwards: Sequence[Callable[[], Tensor]],
    sharding: ModelSharding,
    *,
    change: Callable[[StageWire, int, Sequence[Tensor]], StageWire],
) -> ModelSharding:
    """The same sharding, with each wire changed by the block that reads it and the tensors there in these forwards."""
    blocks, runs = {name: module.get_submodule(name) for name in sharding.block_names}, []
    for forward in forwards:
        with torch.no_grad(), record_calls(blocks) as calls:
            forward()
        runs.append(calls)
    borders = list[tuple[StageWire, ...]]()
    for stage, wires in zip(sharding.stages[1:], sharding.wires, strict=True):
        arguments = [calls[sharding.block_names[stage.start]][0].arguments for calls in runs]
        tensors = ([value_at(run_arguments, wire.place) for run_arguments in arguments] for wire in wires)
        borders.append(tuple(change(wire, stage.start, each) for wire, each in zip(wires, tensors, strict=True)))
    return replace(sharding, wires=tuple(borders))


def _splits_before_head(module: nn.Module, sharding: ModelSharding) -> dict[str, DimensionSplit]:
    """The splits of parameters. A vocabulary stays whole, and so do layers that are needed after the blocks.

    They change no wire, and a loss looks up targets in all of a head's logits. A table of heads is split with the
    layers that read it, wherever it is defined.
    """
    layers, splits = split_layers(sharding), dict[str, DimensionSplit]()
    for tensor in inventory_of_module(module, {}).tensors:
        owners = {name.rpartition(".")[0] for name in (tensor.name, *tensor.aliases)}
        is_table = layers.keys().isdisjoint(owners) and tensor.name not in sharding.head_tensors
        is_of_vocabulary = any(layers.get(owner) == "vocabulary" for owner in owners)
        is_inside = is_table or -1 not in tensor.needed_with_blocks
        for split in sharding.rule(tensor.name).splits if is_inside and not is_of_vocabulary else ():
            splits[tensor.name] = split
    return splits


def _split_streams(sharding: ModelSharding) -> list[tuple[range, int | str, int]]:
    """(Blocks before which a stream is split along tokens, its argument, its dimension) of each list of blocks."""
    number = {name: i for i, name in enumerate(sharding.block_names)}
    comms = [comm for comm in sharding.boundary_comms if comm.module in number and comm.dim >= 0]
    stops = [number[comm.module] for comm in comms if (comm.operation, comm.side) == ("gather", "output")]
    streams = []
    for comm in comms:
        if (comm.operation, comm.side) == ("split", "input"):
            first = number[comm.module]
            last = min(stop for stop in stops if stop >= first)
            streams.append((range(first + 1, last + 1), comm.argument, comm.dim))
    return streams
