"""The state of a run as named tensors, and its way to a checkpoint and back."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from motet.checkpoint.load import load_checkpoint
from motet.checkpoint.manifest import (
    COMPRESSION_STATE_PREFIX,
    CheckpointManifest,
    complete_checkpoints,
    is_compression_state,
    read_manifest,
)
from motet.checkpoint.save import save_checkpoint
from motet.checkpoint.shard_boxes import CheckpointShard
from motet.collectives.execute.api import sum_scalars
from motet.core.errors import InputError, TrainingDivergedError
from motet.parallel.data_parallel.bucketed_zero import broadcast_buffers, persistent_buffers
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.local_sgd.outer_optimizer import OuterOptimizer
from motet.parallel.process.process_group import RankGroup
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint holds. Randomness needs no state: it follows from the seed and the step."""

    module: nn.Module
    optimizer: ShardedOptimizer
    group: RankGroup
    checkpoint_folder: Path  # Of the checkpoints
    keep_newest: int
    data_fingerprint: str
    outer_optimizer: OuterOptimizer | None = None
    reproducible: str | None = None  # What the bits of the run do not depend on

    def tensors(self) -> dict[str, Tensor]:
        """By name, as views: reading them saves the run, writing to them restores it."""
        replica_tensors = (
            self._replica_tensors()
            if self.outer_optimizer is None
            else _all_replica_tensors(self._replica_tensors(), self.outer_optimizer)
        )
        return {
            name: _to_checkpoint_tensor(part) for name, part in (replica_tensors | self._frozen_parameters()).items()
        }

    def save(self, step: int) -> tuple[Path, int]:
        """The folder of the checkpoint, and its bytes."""
        self.optimizer.sharded_parameters.wait_for_pending()
        is_nonfinite = float(
            not all(master.isfinite().all() for master in self.optimizer.sharded_parameters.local_masters)
        )
        if sum_scalars([is_nonfinite], self.group, self.group.device)[0]:
            raise TrainingDivergedError(
                f"stopped at step {step}: the parameters are not finite after it, so they are not saved; lower "
                "optimizer.learning_rate or lengthen the warm-up, then start again (--resume continues from the last "
                "checkpoint, if there is one)"
            )
        step_group = self.group if self.outer_optimizer is None else self.outer_optimizer.replicas.mesh.shard_group
        broadcast_buffers(self.module, step_group)
        tensors = self.tensors()
        manifest = CheckpointManifest(
            step=step,
            ranks=self.group.world,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            data_fingerprint=self.data_fingerprint,
            shapes={name: list(t.size()) for name, t in tensors.items()},
            dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
            outer={}
            if self.outer_optimizer is None
            else {**self.outer_optimizer.schedule_state(), "steps": self.outer_optimizer.steps},
            reproducible=self.reproducible,
        )
        path = save_checkpoint(self.checkpoint_folder, tensors, manifest, self.keep_newest, self.group.process_group)
        return path, sum(t.nbytes for t in tensors.values())

    def restore(self, checkpoint: Path) -> tuple[int, list[str]]:
        """The step that the checkpoint was made after, and what a person should know about continuing from it."""
        manifest = read_manifest(checkpoint)
        continues_replicas = self.outer_optimizer is not None and self._replicas_match(manifest)
        if self.outer_optimizer is not None and continues_replicas:
            self.outer_optimizer.restore_schedule(manifest.outer["steps"], manifest.shapes)
        load_checkpoint(
            checkpoint,
            self.tensors() if continues_replicas else self._consensus_tensors(manifest),
            self.group.process_group,
        )
        if manifest.data_fingerprint != self.data_fingerprint:
            raise InputError(
                f"the data changed since checkpoint {checkpoint.name} was made (fingerprint {manifest.data_fingerprint} "
                f"then, {self.data_fingerprint} now), so the run would see other samples; restore the data (`stdlib` "
                "differs between Python versions) or start in another run folder"
            )
        self.optimizer.sync_parameters()
        if self.outer_optimizer is not None and not continues_replicas:
            self.outer_optimizer.reset_from_masters(manifest.outer.get("steps", manifest.step))
        return manifest.step, self._change_remarks(manifest)

    def _replica_tensors(self) -> dict[str, LocalShard | Tensor]:
        """What replicas that train apart have one each of."""
        outer_compression_state = {} if self.outer_optimizer is None else self.outer_optimizer.compression_state()
        return (
            self.optimizer.state()
            | {f"buffer/{n}": b.detach() for n, b in persistent_buffers(self.module).items()}
            | {f"{COMPRESSION_STATE_PREFIX}outer/{n}": piece for n, piece in outer_compression_state.items()}
        )

    def _frozen_parameters(self) -> dict[str, LocalShard]:
        return {f"frozen/{n}": local_shard(p) for n, p in self.module.named_parameters() if not p.requires_grad}

    def _consensus_tensors(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """What a run takes that goes on without the replicas of a checkpoint: where they met last."""
        outer_state = {} if self.outer_optimizer is None else self.outer_optimizer.state()
        outer_parameters = {
            n: part for n, part in outer_state.items() if n.startswith("outer/") and n in manifest.shapes
        }
        tensors = self._replica_tensors() | self._frozen_parameters() | outer_parameters
        has_independent_replicas = bool(outer_state or manifest.outer)  # what one replica carries is not for others
        return {
            name: _to_checkpoint_tensor(part)
            for name, part in tensors.items()
            if not (has_independent_replicas and is_compression_state(name))
        }

    def _replicas_match(self, manifest: CheckpointManifest) -> bool:
        """Whether replicas of a checkpoint can go on as ours."""
        steps = {"steps": manifest.outer.get("steps", 0)}
        return manifest.outer == ({} if self.outer_optimizer is None else self.outer_optimizer.schedule_state() | steps)

    def _change_remarks(self, manifest: CheckpointManifest) -> list[str]:
        """What changed that alters the order of additions, and so the last bits."""
        current = {
            "ranks": self.group.world,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "reproducible": self.reproducible,
        }
        if manifest.reproducible == self.reproducible == "layout":
            del current["ranks"]
        replica_remarks = []
        if manifest.outer and not self._replicas_match(manifest):
            replica_remarks = [
                f"the checkpoint holds {manifest.outer['replicas']} replicas that train apart, and not as this run has "
                "them: it goes on from where they met last, with the optimizer state of the first"
            ]
        return (
            replica_remarks
            + self._dropped_state_remarks(manifest)
            + [
                f"the checkpoint was made with {name} = {getattr(manifest, name)}, this run has {value}: it continues, "
                "but not bit for bit as it would have"
                for name, value in current.items()
                if getattr(manifest, name) != value
            ]
        )

    def _dropped_state_remarks(self, manifest: CheckpointManifest) -> list[str]:
        shapes = {name: list(t.size()) for name, t in self.tensors().items()}
        if all(
            shapes.get(name) == shape for name, shape in manifest.shapes.items() if shape and is_compression_state(name)
        ):
            return []
        return [
            "the checkpoint was made with other ranks, buckets or compression: what was to be given again of "
            "compressed gradients is left out"
        ]


def _all_replica_tensors(
    replica_tensors: dict[str, LocalShard | Tensor], outer: OuterOptimizer
) -> dict[str, LocalShard | Tensor]:
    """The state of every replica; who knows nothing of them finds the anchors, and the moments of the first.

    All ranks name the same tensors, but have elements only in those of their own replica.
    """
    tensors: dict[str, LocalShard | Tensor] = dict(outer.state())
    for replica in range(outer.replicas.count):
        for name, tensor in replica_tensors.items():
            is_shared_name = replica == 0 and not name.startswith("master/")
            tensors[name if is_shared_name else f"replica-{replica}/{name}"] = (
                tensor if replica == outer.replicas.replica_index else _empty_shard(tensor)
            )
    return tensors


def _empty_shard(tensor: LocalShard | Tensor) -> LocalShard:
    """No elements of the same whole."""
    values = tensor.values if isinstance(tensor, LocalShard) else tensor.detach().view(-1)
    return LocalShard(tensor.shape, 0, values[:0])


def _to_checkpoint_tensor(tensor: LocalShard | Tensor) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    if tensor.values.numel() == tensor.shape.numel():
        return tensor.values.view(tensor.shape)
    return CheckpointShard.from_values(tensor.values, tensor.shape, tensor.start)


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint in a run's folder of checkpoints."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None
