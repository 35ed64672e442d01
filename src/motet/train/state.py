"""The state of a run as named tensors, and how it is saved to a checkpoint and restored."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from motet.checkpoint.manifest import (
    COMPRESSION_STATE_PREFIX,
    CheckpointManifest,
    complete_checkpoints,
    is_compression_state,
    read_manifest,
)
from motet.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.collectives.execute.api import sum_scalars
from motet.core.errors import TrainingDivergedError, check_input
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.local_sgd.outer_optimizer import OuterOptimizer
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import broadcast_buffers
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint holds. Randomness needs no state: it follows from the seed and the step."""

    module: nn.Module
    optimizer: ShardedOptimizer
    group: RankGroup
    checkpoint_folder: Path
    keep_newest: int
    data_fingerprint: str
    module_part_group: RankGroup  # Ranks that hold the same part of the module
    writes: Callable[[str], bool]  # Whether this rank writes what it holds of a tensor of the module
    outer_optimizer: OuterOptimizer | None = None
    reproducible: str | None = None  # The setting `run.reproducible`

    def tensors(self, *, written: bool = False) -> dict[str, Tensor]:
        """All tensors by name, as views: reading them saves the run, writing to them restores it.

        With `written`, a rank has no elements of what another rank writes to a checkpoint.
        """
        tensors, outer = self._replica_tensors(), self.outer_optimizer
        all_tensors = (_all_replicas(tensors, outer) if outer else tensors) | self._frozen_parameters()
        if written:
            all_tensors = {
                n: t if self.writes(n.rsplit("/", 1)[-1]) else _no_elements(t) for n, t in all_tensors.items()
            }
        return {name: _checkpoint_tensor(tensor) for name, tensor in all_tensors.items()}

    def save(self, step: int) -> tuple[Path, int]:
        """Write a checkpoint. Returns its folder and its bytes."""
        parameters, outer = self.optimizer.sharded_parameters, self.outer_optimizer
        parameters.wait_for_pending()
        has_nonfinite = not all(master.isfinite().all() for master in parameters.local_masters)
        if sum_scalars([float(has_nonfinite)], self.group, self.group.device)[0]:
            raise TrainingDivergedError(
                f"stopped at step {step}: the parameters are not finite after it, so they are not saved; lower "
                "optimizer.learning_rate or lengthen the warm-up, then start again (--resume continues from the last "
                "checkpoint, if there is one)"
            )
        broadcast_buffers(self.module, self.module_part_group)
        tensors = self.tensors(written=True)
        manifest = CheckpointManifest(
            step=step,
            ranks=self.group.world,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            data_fingerprint=self.data_fingerprint,
            shapes={name: list(t.size()) for name, t in tensors.items()},
            dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
            outer={**outer.schedule_state(), "steps": outer.steps} if outer else {},
            reproducible=self.reproducible,
        )
        keep, group = self.keep_newest, self.group.process_group
        path = save_checkpoint(self.checkpoint_folder, tensors, manifest, keep=keep, group=group)
        return path, sum(t.nbytes for t in tensors.values())

    def restore(self, checkpoint: Path) -> tuple[int, list[str]]:
        """Load a checkpoint. Returns its step, and remarks for the user about continuing from it."""
        manifest, outer = read_manifest(checkpoint), self.outer_optimizer
        continues_replicas = outer is not None and self._replicas_match(manifest)
        if outer and continues_replicas:
            outer.restore_schedule(manifest.outer["steps"], manifest.shapes)
        tensors = self.tensors() if continues_replicas else self._consensus_tensors(manifest)
        load_checkpoint(checkpoint, tensors, self.group.process_group)
        check_input(
            manifest.data_fingerprint == self.data_fingerprint,
            f"the data changed since checkpoint {checkpoint.name} was made (fingerprint "
            f"{manifest.data_fingerprint} then, {self.data_fingerprint} now), so the run would see other samples; "
            "restore the data (`stdlib` differs between Python versions) or start in another run folder",
        )
        self.optimizer.sync_parameters()
        if outer and not continues_replicas:
            outer.reset_from_masters(manifest.outer.get("steps", manifest.step))
        return manifest.step, self._change_remarks(manifest)

    def _replica_tensors(self) -> dict[str, LocalShard | Tensor]:
        outer_state = self.outer_optimizer.compression_state() if self.outer_optimizer else {}
        buffers = {f"buffer/{n}": b.detach() for n, b in persistent_buffers(self.module).items()}
        outer_compression = {f"{COMPRESSION_STATE_PREFIX}outer/{n}": shard for n, shard in outer_state.items()}
        return self.optimizer.state() | buffers | outer_compression

    def _frozen_parameters(self) -> dict[str, LocalShard]:
        return {f"frozen/{n}": local_shard(p) for n, p in self.module.named_parameters() if not p.requires_grad}

    def _consensus_tensors(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        outer_state = self.outer_optimizer.state() if self.outer_optimizer else {}
        tensors = self._replica_tensors() | self._frozen_parameters()
        if outer_state or manifest.outer:  # the compression state of one replica is of no use to others
            tensors = {name: tensor for name, tensor in tensors.items() if not is_compression_state(name)}
        outer_parameters = {n: t for n, t in outer_state.items() if n.startswith("outer/") and n in manifest.shapes}
        return {name: _checkpoint_tensor(tensor) for name, tensor in (tensors | outer_parameters).items()}

    def _replicas_match(self, manifest: CheckpointManifest) -> bool:
        schedule = self.outer_optimizer.schedule_state() if self.outer_optimizer else {}
        return manifest.outer == ({**schedule, "steps": manifest.outer.get("steps", 0)} if schedule else {})

    def _change_remarks(self, manifest: CheckpointManifest) -> list[str]:
        remarks = []
        if manifest.outer and not self._replicas_match(manifest):
            remarks.append(
                f"the checkpoint holds {manifest.outer['replicas']} independent replicas with another schedule than "
                "this run: it continues from their last outer step, with the optimizer state of the first"
            )
        shapes = {name: list(t.size()) for name, t in self.tensors().items()}
        stored = {name: shape for name, shape in manifest.shapes.items() if shape and is_compression_state(name)}
        if any(shapes.get(name) != shape for name, shape in stored.items()):
            remarks.append(
                "the checkpoint was made with other ranks, buckets or compression: the error feedback of compressed "
                "gradients is dropped"
            )
        current = {"threads": torch.get_num_threads(), "torch": torch.__version__, "reproducible": self.reproducible}
        if not manifest.reproducible == self.reproducible == "layout":
            current = {"ranks": self.group.world, **current}
        return remarks + [
            f"the checkpoint was made with {name} = {getattr(manifest, name)}, this run has {value}: it continues, "
            "but not bit for bit as it would have"
            for name, value in current.items()
            if getattr(manifest, name) != value
        ]


def _no_elements(tensor: LocalShard | Tensor) -> LocalShard | Tensor:
    values = tensor.values if isinstance(tensor, LocalShard) else tensor.detach()
    return LocalShard(tensor.shape, 0, values.reshape(-1)[:0]) if tensor.shape else tensor


def _all_replicas(local: dict[str, LocalShard | Tensor], outer: OuterOptimizer) -> dict[str, LocalShard | Tensor]:
    """The tensors of every replica; a run without replicas reads the outer parameters, and the moments of the first.
    All ranks name the same tensors, but have elements only in those of their replica."""
    tensors: dict[str, LocalShard | Tensor] = dict(outer.state())
    replica_group = outer.replicas.mesh.replica_group
    for replica in range(replica_group.world):
        for name, tensor in local.items():
            full_name = name if replica == 0 and not name.startswith("master/") else f"replica-{replica}/{name}"
            values = tensor.values if isinstance(tensor, LocalShard) else tensor.detach().view(-1)
            tensors[full_name] = tensor if replica == replica_group.rank else LocalShard(tensor.shape, 0, values[:0])
    return tensors


def _checkpoint_tensor(tensor: LocalShard | Tensor) -> Tensor:
    if isinstance(tensor, Tensor) or tensor.values.numel() == tensor.shape.numel():
        return tensor if isinstance(tensor, Tensor) else tensor.values.view(tensor.shape)
    return CheckpointShard.from_values(tensor.values, tensor.shape, tensor.start)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None
