"""Splits of decoders over tensor-parallel ranks, written by hand, and training with them on ranks of the pool."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.model_sharding import (
    LOSS,
    ActivationSplit,
    BoundaryComm,
    DimensionSplit,
    ModelSharding,
    ShardRule,
)
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job

BLOCKS, HIDDEN, HEAD = 2, 32, 8
PARTIAL = ("dp", "cp", "tp")
STREAM = (DimensionSplit(1, "tp"),)
# A decoder with biases, learned positions and a tied head, such as GPT-2.
GPT2_LIKE = [
    "model.norm=layer", "model.positions=learned", "model.bias=true", "model.tied=true", "model.gated=false",
    "model.activation=gelu_tanh", "model.kv_heads=4",
]  # fmt: skip


def split(dim: int, *parts: int, unit: int = 1) -> ShardRule:
    return ShardRule((DimensionSplit(dim, "tp", parts, unit),))


def decoder_sharding(
    *, heads: int = 4, kv_heads: int = 2, gated: bool = True, tp: int = 2, inner: int = 48
) -> ModelSharding:
    """The split of motet's own decoder: q, k and v in one layer, gate and up in one layer."""
    fused = (heads * HEAD, kv_heads * HEAD, kv_heads * HEAD)
    rules, comms, attributes = dict[str, ShardRule](), list[BoundaryComm](), list[tuple[str, str, int]]()
    for block in (f"blocks.{i}" for i in range(BLOCKS)):
        attention, ffn = f"{block}.attention", f"{block}.ffn"
        for name in ("weight", "bias"):
            rules[f"{attention}.qkv.{name}"] = split(0, *fused, unit=HEAD)
            rules[f"{ffn}.up.{name}"] = split(0, inner, inner) if gated else split(0)
        rules |= {f"{attention}.output.weight": split(1, unit=HEAD), f"{ffn}.down.weight": split(1)}
        rules |= {f"{attention}.{name}_norm.weight": ShardRule(partial_over=PARTIAL) for name in ("query", "key")}
        comms += region(f"{attention}.qkv", f"{attention}.output") + region(f"{ffn}.up", f"{ffn}.down")
        attributes += [(attention, "heads", heads // tp), (attention, "kv_heads", max(1, kv_heads // tp))]
    norms = [f"blocks.{i}.attention.{name}_norm" for i in range(BLOCKS) for name in ("query", "key")]
    entries = [ActivationSplit(norm, "input", (DimensionSplit(2, "tp"),)) for norm in norms]
    return ModelSharding(rules, tuple(comms), tuple(attributes), tuple(entries))


def with_table(sharding: ModelSharding) -> ModelSharding:
    """Ranks split the entries of the table too, which the head does not share."""
    comms, rules = region("embedding", "embedding"), {**sharding.rules, "embedding.weight": split(0)}
    return replace(sharding, rules=rules, boundary_comms=(*comms, *sharding.boundary_comms))


def with_sequence(
    sharding: ModelSharding, names: Iterable[str], blocks: str, *, gather_at: Mapping[str, str] | None = None
) -> ModelSharding:
    """Between the layers that are split, blocks split the sequence. Inputs are gathered where layers read them, or
    where a module around them does."""
    around = gather_at or {}
    operations = {"copy": "gather", "sum": "scatter"}
    comms = [BoundaryComm(f"{blocks}.0", "input", 0, "split", "tp", 1)]
    for comm in sharding.boundary_comms:
        block, _, layer = comm.module.partition(f"{blocks}.")[2].partition(".")
        module = f"{blocks}.{block}.{around[layer]}" if layer in around else comm.module
        shared = (comm.module, *comm.shared_by) if layer in around else comm.shared_by
        comms.append(replace(comm, module=module, operation=operations[comm.operation], dim=1, shared_by=shared))
    comms.append(BoundaryComm(f"{blocks}.{BLOCKS - 1}", "output", 0, "gather", "tp", 1))
    rows = {f"{comm.module}.bias" for comm in sharding.boundary_comms if comm.side == "output"}
    partial = {n: ShardRule(partial_over=PARTIAL) for n in names if n.startswith(blocks) and n not in rows}
    entries = [ActivationSplit(f"{blocks}.{i}", "input", STREAM) for i in range(BLOCKS)]
    return replace(
        sharding,
        rules={**partial, **sharding.rules},
        boundary_comms=tuple(comms),
        activations=(*entries, *sharding.activations),
    )


def huggingface_gpt2_sharding() -> ModelSharding:
    """The split of transformers' GPT-2, whose layers have weights of [in, out]."""
    rules, comms, attributes = dict[str, ShardRule](), list[BoundaryComm](), list[tuple[str, str, int]]()
    for block in (f"transformer.h.{i}" for i in range(BLOCKS)):
        fused, attention, mlp = (HIDDEN, HIDDEN, HIDDEN), f"{block}.attn", f"{block}.mlp"
        rules |= {f"{attention}.c_attn.weight": split(1, *fused, unit=HEAD), f"{mlp}.c_fc.weight": split(1)}
        rules |= {f"{attention}.c_attn.bias": split(0, *fused, unit=HEAD), f"{mlp}.c_fc.bias": split(0)}
        rules |= {f"{attention}.c_proj.weight": split(0), f"{mlp}.c_proj.weight": split(0)}
        comms += region(f"{attention}.c_attn", f"{attention}.c_proj") + region(f"{mlp}.c_fc", f"{mlp}.c_proj")
        attributes += [(attention, "num_heads", 2), (attention, "split_size", HIDDEN // 2)]
    return ModelSharding(rules, tuple(comms), tuple(attributes))


def llama_sharding(kv_heads: int = 2, tp: int = 2, targets: tuple[str, ...] = ()) -> ModelSharding:
    """The split of transformers' Llama, with adapters on the targets: three layers read one tensor, and two another."""
    rules, comms, attributes = dict[str, ShardRule](), list[BoundaryComm](), list[tuple[str, str, int]]()
    for block in (f"model.layers.{i}" for i in range(BLOCKS)):
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        columns = [f"{attention}.{name}_proj" for name in "qkv"], [f"{mlp}.{name}_proj" for name in ("gate", "up")]
        rows = f"{attention}.o_proj", f"{mlp}.down_proj"
        for layers, row in zip(columns, rows, strict=True):
            unit = HEAD if "attn" in row else 1
            comms += region(layers[0], row, *layers[1:])
            rules |= {f"{layer}.weight": split(0, unit=unit) for layer in layers} | {
                f"{row}.weight": split(1, unit=unit)
            }
            for layer in (layer for layer in layers if layer.rpartition(".")[2] in targets):
                rules |= {
                    f"{layer}.adapter_a": ShardRule(partial_over=PARTIAL),
                    f"{layer}.adapter_b": split(0, unit=unit),
                }
            if row.rpartition(".")[2] in targets:
                rules |= {f"{row}.adapter_a": split(1, unit=unit), f"{row}.adapter_b": ShardRule(partial_over=PARTIAL)}
        if kv_heads < tp:
            attributes.append((attention, "num_key_value_groups", 4 // tp))
            shared = [f"{attention}.{name}_proj.weight" for name in "kv"]
            rules |= {name: ShardRule(rules[name].splits, PARTIAL) for name in shared}
    return ModelSharding(rules, tuple(comms), tuple(attributes))


class _GatedBlock(nn.Module):
    """A block that drops inner activations and its output, and changes outputs of its layers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        inner = F.dropout(torch.tanh(self.gate(normed)) * F.relu_(self.up(normed)), 0.2, self.training)
        output: Tensor = self.down(inner)
        output += normed
        return x + F.dropout(output, 0.3, self.training)


class Recomputed(nn.Module):
    """Blocks of which only the input is kept for backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.table, self.head, self.reentrant = nn.Embedding(260, HIDDEN), nn.Linear(HIDDEN, 260), reentrant
        self.blocks = nn.ModuleList(_GatedBlock() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.table(tokens), 0.1, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if x.requires_grad else block(x)
        logits: Tensor = self.head(x)
        return logits


def recomputed_sharding() -> ModelSharding:
    rules, comms = dict[str, ShardRule](), list[BoundaryComm]()
    for block in (f"blocks.{i}" for i in range(BLOCKS)):
        rules |= {f"{block}.{layer}.{name}": split(0) for layer in ("gate", "up") for name in ("weight", "bias")}
        rules[f"{block}.down.weight"] = split(1)
        comms += region(f"{block}.gate", f"{block}.down", f"{block}.up")
    return ModelSharding(rules, tuple(comms))


def region(column: str, row: str, *others: str) -> list[BoundaryComm]:
    opening = BoundaryComm(column, "input", 0, "copy", "tp", shared_by=others)
    return [opening, BoundaryComm(row, "output", 0, "sum", "tp")]


def with_vocabulary(
    sharding: ModelSharding, table: str, head: str, *tensors: str, others: tuple[str, ...] = (), gathers: bool = False
) -> ModelSharding:
    """The same split, with a table and a head whose tensors are split by rows, and the table's where it is another."""
    argument, operation = (0, "gather") if gathers else (LOSS, "sum")
    comms = (
        BoundaryComm(table, "output", 0, "sum", "tp"),
        *sharding.boundary_comms,
        BoundaryComm(head, "input", 0, "copy", "tp"),
        BoundaryComm(head, "output", argument, operation, "tp"),
    )
    rules = {**sharding.rules, **{name: split(0) for name in (*tensors, *others)}}
    return replace(sharding, rules=rules, boundary_comms=comms, head_tensors=tensors)


@dataclass
class Parts:
    """The parts of tensors that a rank has."""

    specs: dict[str, ShardSpec]
    shards: dict[str, LocalShard]


@dataclass
class SplitRun:
    """A few steps on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)  # Of each step
    parameters: Parts = field(default_factory=lambda: Parts({}, {}))  # Masters after the last step


def train_split(group: RankGroup, job: Job, sharding: ModelSharding | None, steps: int = 3) -> SplitRun:
    """The first steps of a job on this rank."""
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts, run = build_components(job, group, Path(folder), model_sharding=sharding), SplitRun()
        train_step, parameters = parts.make_train_step(job), parts.engine.optimizer.sharded_parameters
        for step in range(steps):
            result = train_step.step(step, 0.01)
            run.losses.append(result.loss)
            run.norms.append(result.grad_norm)
            run.gradients.append(_held(parts, parameters.local_shards(parameters.local_gradients())))
        run.parameters = _held(parts, parameters.local_shards(parameters.local_masters))
    return run


def _held(parts: TrainingComponents, shards: dict[str, LocalShard]) -> Parts:
    specs = {name: parts.engine.plan.specs[name][parts.group.rank] for name in shards}
    return Parts(specs, {n: LocalShard(s.shape, s.start, s.values.detach().clone()) for n, s in shards.items()})


def assemble(parts_of_ranks: list[Parts]) -> dict[str, Tensor]:
    """Whole tensors. Elements that several ranks hold must be equal."""
    tensors: dict[str, Tensor] = {}
    for parts in parts_of_ranks:
        for name, shard in parts.shards.items():
            spec, values = parts.specs[name], shard.values.view(-1)
            indices = torch.arange(torch.Size(spec.shape).numel()).view(spec.shape)
            for dim, spans in enumerate(spec.spans):
                indices = torch.cat([indices.narrow(dim, first, stop - first) for first, stop in spans], dim)
            for dim, padding in enumerate(spec.padding):
                filler = indices.new_full((*indices.shape[:dim], padding, *indices.shape[dim + 1 :]), -1)
                indices = torch.cat([indices, filler], dim)
            flat = indices.reshape(-1)[shard.start : shard.start + values.numel()]
            assert not values[flat < 0].any(), f"{name}: padding is not zero"
            known = tensors.setdefault(name, values.new_full((torch.Size(spec.shape).numel(),), torch.nan))
            before = known[flat[flat >= 0]]
            assert (before.isnan() | (before == values[flat >= 0])).all(), f"{name}: copies differ"
            known[flat[flat >= 0]] = values[flat >= 0]
    for name, tensor in tensors.items():
        assert not tensor.isnan().any(), f"{name}: no rank holds some elements"
    return {name: tensor.view(_shape(parts_of_ranks, name)) for name, tensor in tensors.items()}


def _shape(parts_of_ranks: list[Parts], name: str) -> tuple[int, ...]:
    return next(parts.specs[name].shape for parts in parts_of_ranks if name in parts.specs)


def worst_difference(runs: list[SplitRun], alone: SplitRun, rates: float) -> float:
    """The largest relative difference: gradients against their share of the norm of all, parameters against rates."""
    scalars = [
        abs(a - b) / abs(b)
        for run in runs
        for a, b in zip([*run.losses, *run.norms], [*alone.losses, *alone.norms], strict=True)
    ]
    tensors = []
    for step, gradients in enumerate(alone.gradients):
        wanted, actual = assemble([gradients]), assemble([run.gradients[step] for run in runs])
        norm = torch.cat([t.view(-1) for t in wanted.values()]).norm().item()
        unit = norm / sum(t.numel() for t in wanted.values()) ** 0.5
        tensors += [_distance(actual[name], tensor, unit) for name, tensor in wanted.items()]
    actual = assemble([run.parameters for run in runs])
    tensors += [_distance(actual[name], t, rates) for name, t in assemble([alone.parameters]).items()]
    return max(scalars + tensors)


def _distance(actual: Tensor, wanted: Tensor, unit: float) -> float:
    return ((actual - wanted).norm() / max(wanted.norm().item(), unit * wanted.numel() ** 0.5)).item()
