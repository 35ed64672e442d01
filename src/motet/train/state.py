"""The state of a run as named tensors, and how it is saved to a checkpoint and restored."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motet.checkpoint.background_writer import CheckpointSaver, ShardToWrite
from motet.checkpoint.checkpoint_folders import complete_checkpoints
from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint, read_shared_manifest
from motet.checkpoint.manifest import (
    COMPRESSION_STATE_PREFIX,
    CheckpointManifest,
    LossScaling,
    SavedBy,
    is_compression_state,
)
from motet.checkpoint.writers import parts_to_write
from motet.core.errors import check_input
from motet.core.units import dtype_name
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.local_sgd.outer_optimizer import OuterOptimizer
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup, broadcast_buffers
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import HeldRun, StepPlan, held_runs
from motet.train.optimizer.pending_gradients import RATE, is_pending_gradient
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer


class HeldTensor(NamedTuple):
    """The elements that this rank holds of a tensor of a checkpoint."""

    values: Tensor
    run: HeldRun  # Its ranks are those of the whole run


HeldTensors = dict[str, HeldTensor]


class ResumePoint(NamedTuple):
    """The checkpoint and the step from which a run continues."""

    checkpoint: Path | None
    completed_steps: int
    remarks: list[str]  # Changes since the checkpoint that the user should know about


@dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint holds. Randomness needs no state: it follows from the seed and the step."""

    module: nn.Module
    optimizer: ShardedOptimizer
    group: RankGroup
    saver: CheckpointSaver
    data_fingerprint: str
    module_part_group: RankGroup  # Ranks that hold the same part of the module
    plan: StepPlan
    outer_optimizer: OuterOptimizer | None = None
    reproducible: str | None = None  # The setting `run.reproducible`

    def tensors(self) -> dict[str, CheckpointShard]:
        """The shards that this rank holds by name, as views: writing to them restores the state."""
        return _as_shards(self._all_held())

    def written_tensors(self) -> dict[str, CheckpointShard]:
        """The shards that this rank writes to a checkpoint, by name: all ranks together write each element once."""
        held = self._all_held()
        runs = {name: (tensor.run, tensor.values.itemsize) for name, tensor in held.items()}
        return {
            name: CheckpointShard.from_values(held[name].values, run.spec, run.start, parts=parts)
            for name, (run, parts) in parts_to_write(runs, self.group.rank).items()
        }

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of the checkpoints."""
        return self.saver.folder

    def save(self, step: int) -> Path:
        """Write a checkpoint, and wait until it is complete. Every rank calls it. Returns its folder."""
        self.saver.clear()
        folder = self.start_save(step)
        self.saver.finish()
        return folder

    def start_save(self, step: int) -> Path:
        """Begin to write a checkpoint of this state while the run goes on: every rank calls it, `saver.finish` before
        the next one, and `saver.close` at the end. Returns the folder that the checkpoint gets."""
        start_s = time.perf_counter()
        outer, scaler = self.outer_optimizer, self.optimizer.loss_scaler
        self.check_buffers()
        broadcast_buffers(self.module, self.module_part_group)
        saved_by = SavedBy(
            ranks=self.group.world,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            reproducible=self.reproducible,
            outer={**outer.schedule_state(), "steps": outer.steps} if outer else {},
            loss_scaling=LossScaling(**scaler.state()) if scaler else None,
        )
        shapes, dtypes = self._shapes_and_dtypes
        manifest = CheckpointManifest(step, self.data_fingerprint, shapes, dtypes, saved_by)
        shards = self._shards_to_write()
        self.optimizer.before_update = self.saver.before_update
        try:
            return self.saver.start(manifest, shards, waited_s=time.perf_counter() - start_s)
        finally:
            self.optimizer.drop_copies()

    def _shards_to_write(self) -> dict[str, ShardToWrite]:
        """The shards that this rank writes, in the order in which updates need them written. Only masters, moments and
        pending gradients are read while training goes on, and frozen parameters; all others are copied, as is all
        that outer steps change."""
        shards, order = dict[str, ShardToWrite](), self.optimizer.sharded_parameters.update_order or ()
        indices, rank_of_slice = self.optimizer.index_by_parameter(), {index: at for at, index in enumerate(order)}
        for full_name, shard in self.written_tensors().items():
            kind, _, name = full_name.partition("/")
            if kind in self.optimizer.changed_kinds and name in indices and self.outer_optimizer is None:
                shards[full_name] = ShardToWrite(shard, indices[name], must_be_finite=kind == "master")
            elif kind == "frozen":
                shards[full_name] = ShardToWrite(shard)
            else:
                is_master = "master" in full_name.split("/")[:-1]
                shards[full_name] = ShardToWrite(shard, is_copied=True, must_be_finite=is_master)
        last = len(order) + len(indices)
        when = {None: last} | {index: rank_of_slice.get(index, len(order) + index) for index in indices.values()}
        return dict(sorted(shards.items(), key=lambda item: when[item[1].slice_index]))

    def restore_newest(self) -> ResumePoint:
        """Load the newest checkpoint, if there is one, and clear what a killed run left in the folder."""
        newest = newest_checkpoint(self.checkpoint_folder)
        resume_point = ResumePoint(newest, *self.restore(newest)) if newest else ResumePoint(None, 0, [])
        # Here, because a run that was killed at its end saves nothing more.
        self.saver.clear()
        return resume_point

    def restore(self, checkpoint: Path) -> tuple[int, list[str]]:
        """Load a checkpoint. Returns its step, and remarks for the user about continuing from it."""
        manifest, outer = read_shared_manifest(checkpoint, self.group.process_group), self.outer_optimizer
        saved_by, continues_replicas = manifest.saved_by, outer is not None and self._replicas_match(manifest.saved_by)
        if outer and continues_replicas:
            outer.restore_schedule(saved_by.outer["steps"], saved_by.shapes)
        tensors = self.tensors() if continues_replicas else self._consensus_tensors(saved_by)
        if RATE not in saved_by.shapes:  # Its gradients were applied between its steps
            tensors = {name: each for name, each in tensors.items() if not is_pending_gradient(name)}
            self.optimizer.forget_pending_gradients()
        load_checkpoint(checkpoint, tensors, self.group.process_group, shapes=self._shapes_and_dtypes[0])
        check_input(
            manifest.data_fingerprint == self.data_fingerprint,
            f"the data changed since checkpoint {checkpoint.name} was made (fingerprint "
            f"{manifest.data_fingerprint} then, {self.data_fingerprint} now), so the run would see other samples; "
            "restore the data (`stdlib` differs between Python versions) or start in another run folder",
        )
        if self.optimizer.loss_scaler and saved_by.loss_scaling:
            self.optimizer.loss_scaler = self.optimizer.loss_scaler.restored(asdict(saved_by.loss_scaling))
        self.optimizer.sync_parameters()
        if outer and not continues_replicas:
            outer.reset_from_masters(saved_by.outer.get("steps", manifest.step))
        return manifest.step, self._change_remarks(manifest)

    @cached_property
    def _shapes_and_dtypes(self) -> tuple[dict[str, list[int]], dict[str, str]]:
        """All tensors of the model and its optimizer, from the inventory: the same on every rank."""
        kinds = {
            kind: (value.ndim > 0, dtype_name(value.dtype)) for kind, value in self.optimizer.state_kinds().items()
        }
        dtypes = {kind: dtype for kind, (is_of_parameters, dtype) in kinds.items() if not is_of_parameters}
        shapes: dict[str, list[int]] = {kind: [] for kind in dtypes}
        for tensor in self.plan.inventory.tensors:
            if tensor.kind == "trained":
                named = {f"{kind}/{tensor.name}": dtype for kind, (has_shape, dtype) in kinds.items() if has_shape}
            elif tensor.kind == "frozen":
                named = {f"frozen/{tensor.name}": tensor.dtype}
            else:
                named = {f"buffer/{name}": tensor.dtype for name in (tensor.name, *tensor.aliases)}
            dtypes |= named
            shapes |= {name: list(tensor.shape) for name in named}
        return shapes, dtypes

    def check_buffers(self) -> None:
        """Refuse a module whose buffers differ in shape or dtype from those at its start, with which a run resumes."""
        shapes, dtypes = self._shapes_and_dtypes
        then = {key: f"{shape} of {dtypes[key]}" for key, shape in shapes.items() if key.startswith("buffer/")}
        now = {
            f"buffer/{name}": f"{list(buffer.shape)} of {dtype_name(buffer.dtype)}"
            for name, buffer in persistent_buffers(self.module).items()
        }
        for key in sorted(then.keys() | now.keys()):
            before, after = then.get(key, "missing"), now.get(key, "missing")
            check_input(
                before == after,
                f"{key.replace('/', ' ')} was {before} at the start and is {after} now, so no run could resume from a "
                "checkpoint; register buffers before training with their final shapes, or with persistent=False",
            )

    # --- what this rank holds --------------------------------------------------------------------------

    def _all_held(self) -> HeldTensors:
        """All tensors that this rank holds. Those of an independent replica have its number, with exceptions.

        A run without replicas reads the outer parameters, and the state of the first replica other than its masters.
        """
        outer, held = self.outer_optimizer, self._held_by_replica()
        if outer is not None:
            replica = outer.replicas.mesh.replica_group.rank
            is_plain = {name: replica == 0 and not name.startswith("master/") for name in held}
            held = {name if is_plain[name] else f"replica-{replica}/{name}": each for name, each in held.items()}
        return self._held_outer() | held | self._held_frozen()

    def _held_by_replica(self) -> HeldTensors:
        """Tensors whose values differ between independent replicas; without replicas, all but frozen parameters."""
        buffers = {name: local_shard(buffer) for name, buffer in persistent_buffers(self.module).items()}
        kinds: dict[str, Mapping[str, LocalShard]] = {**self.optimizer.state_by_kind(), "buffer": buffers}
        if self.outer_optimizer is not None:
            kinds[f"{COMPRESSION_STATE_PREFIX}outer"] = self.outer_optimizer.compression_state()
        return self._hold(kinds) | self._held_compression()

    def _held_outer(self) -> HeldTensors:
        return self._hold(self.outer_optimizer.state_by_kind(), in_all_replicas=True) if self.outer_optimizer else {}

    def _held_frozen(self) -> HeldTensors:
        frozen = {name: local_shard(p) for name, p in self.module.named_parameters() if not p.requires_grad}
        return self._hold({"frozen": frozen}, in_all_replicas=True)

    def _held_compression(self) -> HeldTensors:
        """State of compressed reductions: for each sync group a row per rank, and the count of steps."""
        held: HeldTensors = {}
        for engine in self.optimizer.sharded_parameters.engines:
            ranks = tuple(rank for sum_group in engine.plan.group.sum_groups for rank in sum_group)
            rank = self.group.rank % self.plan.dims.ranks
            prefix = f"{COMPRESSION_STATE_PREFIX}groups/{next(iter(engine.plan.group.names), 'frozen')}"
            for name, values in engine.communicator.compression_state().items():
                row, shape = ranks.index(rank), (len(ranks), values.numel())
                run = HeldRun(ShardSpec.full(shape), row * values.numel(), (row + 1) * values.numel(), (rank,))
                run = run if values.ndim else HeldRun(ShardSpec.full(()), 0, 1, ranks)
                held[f"{prefix}/{name}"] = HeldTensor(values, self._in_replicas(run))
        return held

    def _hold(self, kinds: Mapping[str, Mapping[str, LocalShard]], *, in_all_replicas: bool = False) -> HeldTensors:
        """Shards by kind and logical name; a number that all parameters share has the name "". Tensors of stages that
        this rank does not hold are left out."""
        runs = {"": HeldRun(ShardSpec.full(()), 0, 1, tuple(range(self.plan.dims.ranks)))} | self._runs
        held: HeldTensors = {}
        for kind, name, shard in ((kind, *each) for kind, shards in kinds.items() for each in shards.items()):
            if shard.values.numel() and (name in runs or not self.plan.model_sharding.stages):
                run = runs[name]
                assert (run.start, run.stop - run.start) == (shard.start, shard.values.numel()), (kind, name)
                run = self._in_replicas(run, everywhere=in_all_replicas)
                held[f"{kind}/{name}" if name else kind] = HeldTensor(shard.values, run)
        return held

    @cached_property
    def _runs(self) -> dict[str, HeldRun]:
        return held_runs(self.plan, self.group.rank % self.plan.dims.ranks)

    def _in_replicas(self, run: HeldRun, *, everywhere: bool = False) -> HeldRun:
        """The same run with the ranks of this replica, or of all replicas, among the ranks of the whole run."""
        size = self.plan.dims.ranks
        firsts = range(0, self.group.world, size) if everywhere else [self.group.rank // size * size]
        return run._replace(ranks=tuple(first + rank for first in firsts for rank in run.ranks))

    # --- continuing from a checkpoint ------------------------------------------------------------------

    def _consensus_tensors(self, saved_by: SavedBy) -> dict[str, CheckpointShard]:
        held = self._held_by_replica() | self._held_frozen()
        if self.outer_optimizer or saved_by.outer:  # the compression state of one replica is of no use to others
            held = {name: tensor for name, tensor in held.items() if not is_compression_state(name)}
        momenta = {n: t for n, t in self._held_outer().items() if n.startswith("outer/") and n in saved_by.shapes}
        return _as_shards(held | momenta)

    def _replicas_match(self, saved_by: SavedBy) -> bool:
        schedule = self.outer_optimizer.schedule_state() if self.outer_optimizer else {}
        return saved_by.outer == ({**schedule, "steps": saved_by.outer.get("steps", 0)} if schedule else {})

    def _change_remarks(self, manifest: CheckpointManifest) -> list[str]:
        remarks, saved_by = [], manifest.saved_by
        if saved_by.outer and not self._replicas_match(saved_by):
            remarks.append(
                f"the checkpoint holds {saved_by.outer['replicas']} independent replicas with another schedule than "
                "this run: it continues from their last outer step, with the optimizer state of the first"
            )
        shapes = {name: list(t.spec.shape) for name, t in self.tensors().items()}
        stored = {name: shape for name, shape in saved_by.shapes.items() if shape and is_compression_state(name)}
        if any(shapes.get(name) != shape for name, shape in stored.items()):
            remarks.append(
                "the checkpoint was made with other ranks, buckets or compression: the error feedback of compressed "
                "gradients is dropped"
            )
        now, stored_dtypes = (
            self.optimizer.state_kinds()["master"].dtype,
            {dtype for name, dtype in manifest.dtypes.items() if name.startswith("master/")},
        )
        for dtype in sorted(stored_dtypes - {dtype_name(now)}):
            loss = "rounded" if getattr(torch, dtype).itemsize > now.itemsize else "converted without a loss"
            remarks.append(
                f"the checkpoint has masters in {dtype}, this run in {dtype_name(now)}: they and moments of that dtype "
                f"are {loss}, and the run continues, but not bit for bit as it would have"
            )
        if RATE in saved_by.shapes and not self.optimizer.delays:
            remarks.append("the gradients of its last step, which memory.update = 'delayed' would apply, are dropped")
        current = {"threads": torch.get_num_threads(), "torch": torch.__version__, "reproducible": self.reproducible}
        if not saved_by.reproducible == self.reproducible == "layout":
            current = {"ranks": self.group.world, **current}
        return remarks + [
            f"the checkpoint was made with {name} = {getattr(saved_by, name)}, this run has {value}: it continues, "
            "but not bit for bit as it would have"
            for name, value in current.items()
            if getattr(saved_by, name) != value
        ]


def _as_shards(held: HeldTensors) -> dict[str, CheckpointShard]:
    return {n: CheckpointShard.from_values(values, run.spec, run.start) for n, (values, run) in held.items()}


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None
