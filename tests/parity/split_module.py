"""A module whose feed-forward network is split over tensor-parallel ranks by hooks, and its verification."""

import atexit
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import (
    ActivationSplit,
    BoundaryComm,
    DimensionSplit,
    ModelSharding,
    ShardRule,
    TensorInfo,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parity.compare.reference_runs import ReferenceRuns, run_reference
from motet.parity.diagnose.single_device_recompute import recompute_layout
from motet.parity.layout_verdict import LayoutVerdict, verify_recorded_steps
from motet.parity.record.record_verification_steps import RecordedStep, record_phases
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.optimizer import module_plan
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from parity.faults import Patch, Plant, around, changed, nothing
from ranks import Ranks
from train.runs import small_job

WIDTH, INNER = 8, 12


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return result


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(260, WIDTH), nn.Linear(WIDTH, 260)
        self.blocks = nn.ModuleList([FeedForward(), FeedForward()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class HeadsByCount(nn.Module):
    """Attention that divides whatever width it has by its number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return mixed


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(260, 16), nn.Linear(16, 260)
        self.blocks = nn.ModuleList([HeadsByCount(), HeadsByCount()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


COLUMN, ROW = ShardRule((DimensionSplit(0, "tp"),)), ShardRule((DimensionSplit(1, "tp"),))
BLOCKS = ("blocks.0", "blocks.1")
RULES = {f"{block}.up.{name}": COLUMN for block in BLOCKS for name in ("weight", "bias")}
COMMS = tuple(
    comm
    for block in BLOCKS
    for comm in (
        BoundaryComm(f"{block}.up", "input", 0, "copy", "tp"),
        BoundaryComm(f"{block}.down", "output", 0, "sum", "tp"),
    )
)
SHARDING = ModelSharding(
    rules={**RULES, **{f"{block}.down.weight": ROW for block in BLOCKS}},
    boundary_comms=COMMS,
    activations=tuple(
        ActivationSplit(f"{block}.{name}", "output", splits)
        for block in BLOCKS
        for name, splits in (("norm", ()), ("up", (DimensionSplit(2, "tp"),)), ("down", ()))
    ),
)


@dataclass(frozen=True)
class SwappedColumns(ModelSharding):
    """Ranks hold the columns of each other, and say so; the rows that they multiply are their own."""

    def _shard(self, tensor: TensorInfo, coordinates: Mapping[str, int], dims: ParallelDims) -> ShardSpec:
        is_column = ".up." in tensor.name
        swapped = {**coordinates, "tp": dims.size("tp") - 1 - coordinates["tp"]} if is_column else coordinates
        return super()._shard(tensor, swapped, dims)


def a_copy_drifts(rank: int) -> Patch:
    def drift(_: None, optimizer: ShardedOptimizer, *rest: Any) -> None:
        first = next(iter(optimizer.sharded_parameters.local_masters)).view(-1)
        first[1] = torch.nextafter(first[1], torch.tensor(torch.inf, dtype=first.dtype))

    return changed(ShardedOptimizer, "update", drift) if rank == 3 else nothing()


@lru_cache(maxsize=1)
def reference() -> tuple[JobVerificationSubject, ReferenceRuns]:
    folder = Path(mkdtemp(prefix="motet-split-"))
    atexit.register(shutil.rmtree, folder)
    factory = "model={factory='parity.split_module:Split'}"
    job = small_job(folder, "run.steps=3", "checkpoint.keep=100", "data.sequence_length=8", factory)
    subject = JobVerificationSubject(job)
    return subject, run_reference(subject, folder)


def records_of_rank(
    group: RankGroup, subject: JobVerificationSubject, folder: Path, own: str, plant: Plant, is_proven: bool
) -> list[RecordedStep]:
    unproven = nullcontext() if is_proven else around(module_plan, "prove_step_plan", lambda own, plan: None)
    with plant(group.rank), unproven, subject.numerics():
        return list(record_phases(subject, group, folder, checkpoint_subfolder=own))


def nowhere(rank: int) -> Any:
    return nothing()


def verified(
    ranks: Ranks,
    executed: ModelSharding,
    *sizes: tuple[str, int],
    claimed: ModelSharding | None = None,
    plant: Plant = nowhere,
    is_proven: bool = True,
) -> LayoutVerdict:
    """Verify a split that ranks execute; the comparison may go by another one that is claimed."""
    subject, runs = reference()
    job = subject.job.model_copy(update={"layout": subject.job.layout.model_copy(update=dict(sizes))})
    world, own = job.layout.dims.ranks, Path(mkdtemp(dir=runs.folder)).name
    split = JobVerificationSubject(job, executed)
    steps = ranks.run(world, records_of_rank, split, runs.folder, own, plant, is_proven, timeout_s=120)
    recorded = {rank_steps[0][0]: [records for _, records in rank_steps] for rank_steps in zip(*steps, strict=True)}
    recompute = recompute_layout(JobVerificationSubject(job, claimed or executed), world, runs)
    return verify_recorded_steps("split", recompute, recorded)
