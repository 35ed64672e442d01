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
from motet.train.optimizer import Updater


@dataclass(frozen=True)
class RunState:
    """Everything that a checkpoint holds. Randomness needs no state: it follows from the seed and the step."""

    module: nn.Module
    updater: Updater
    group: RankGroup
    folder: Path
    """Of the checkpoints."""
    keep: int
    data_fingerprint: str
    outer: OuterOptimizer | None = None
    reproducible: str | None = None
    """What the bits of the run do not depend on."""

    def tensors(self) -> dict[str, Tensor]:
        """By name, as views: reading them saves the run, writing to them restores it."""
        own = self._own() if self.outer is None else _apart(self._own(), self.outer)
        return {name: _stored(part) for name, part in (own | self._frozen()).items()}

    def save(self, step: int) -> tuple[Path, int]:
        """The folder of the checkpoint, and its bytes."""
        self.updater.spread.wait_for_pending()
        wrong = float(not all(master.isfinite().all() for master in self.updater.spread.local_masters))
        if sum_scalars([wrong], self.group, self.group.device)[0]:
            raise TrainingDivergedError(
                f"stopped at step {step}: the parameters are not finite after it, so they are not saved; lower "
                "optimizer.learning_rate or lengthen the warm-up, then start again (--resume continues from the last "
                "checkpoint, if there is one)"
            )
        ranks = self.group if self.outer is None else self.outer.replicas.mesh.shard_group
        broadcast_buffers(self.module, ranks)
        tensors = self.tensors()
        manifest = CheckpointManifest(
            step=step,
            ranks=self.group.world,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            data_fingerprint=self.data_fingerprint,
            shapes={name: list(t.size()) for name, t in tensors.items()},
            dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
            outer={} if self.outer is None else {**self.outer.schedule_state(), "steps": self.outer.steps},
            reproducible=self.reproducible,
        )
        path = save_checkpoint(self.folder, tensors, manifest, self.keep, self.group.process_group)
        return path, sum(t.nbytes for t in tensors.values())

    def restore(self, where: Path) -> tuple[int, list[str]]:
        """The step that the checkpoint was made after, and what a person should know about continuing from it."""
        manifest = read_manifest(where)
        goes_on = self.outer is not None and self._fits(manifest)
        if self.outer is not None and goes_on:
            self.outer.restore_schedule(manifest.outer["steps"], manifest.shapes)
        load_checkpoint(where, self.tensors() if goes_on else self._from(manifest), self.group.process_group)
        if manifest.data_fingerprint != self.data_fingerprint:
            raise InputError(
                f"the data changed since checkpoint {where.name} was made (fingerprint {manifest.data_fingerprint} "
                f"then, {self.data_fingerprint} now), so the run would see other samples; restore the data (`stdlib` "
                "differs between Python versions) or start in another run folder"
            )
        self.updater.publish()
        if self.outer is not None and not goes_on:
            self.outer.reset_from_masters(manifest.outer.get("steps", manifest.step))
        return manifest.step, self._changes(manifest)

    def _own(self) -> dict[str, LocalShard | Tensor]:
        """What replicas that train apart have one each of."""
        carried = {} if self.outer is None else self.outer.compression_state()
        return (
            self.updater.state()
            | {f"buffer/{n}": b.detach() for n, b in persistent_buffers(self.module).items()}
            | {f"{COMPRESSION_STATE_PREFIX}outer/{n}": piece for n, piece in carried.items()}
        )

    def _frozen(self) -> dict[str, LocalShard]:
        return {f"frozen/{n}": local_shard(p) for n, p in self.module.named_parameters() if not p.requires_grad}

    def _from(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """What a run takes that goes on without the replicas of a checkpoint: where they met last."""
        agreed = {} if self.outer is None else self.outer.state()
        met = {n: part for n, part in agreed.items() if n.startswith("outer/") and n in manifest.shapes}
        found = self._own() | self._frozen() | met
        apart = bool(agreed or manifest.outer)  # what one replica carries is not for others
        return {name: _stored(part) for name, part in found.items() if not (apart and is_compression_state(name))}

    def _fits(self, manifest: CheckpointManifest) -> bool:
        """Whether replicas of a checkpoint can go on as ours."""
        steps = {"steps": manifest.outer.get("steps", 0)}
        return manifest.outer == ({} if self.outer is None else self.outer.schedule_state() | steps)

    def _changes(self, manifest: CheckpointManifest) -> list[str]:
        """What changed that alters the order of additions, and so the last bits."""
        now = {
            "ranks": self.group.world,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "reproducible": self.reproducible,
        }
        if manifest.reproducible == self.reproducible == "layout":
            del now["ranks"]
        apart = []
        if manifest.outer and not self._fits(manifest):
            apart = [
                f"the checkpoint holds {manifest.outer['replicas']} replicas that train apart, and not as this run has "
                "them: it goes on from where they met last, with the optimizer state of the first"
            ]
        return (
            apart
            + self._left_out(manifest)
            + [
                f"the checkpoint was made with {name} = {getattr(manifest, name)}, this run has {value}: it continues, "
                "but not bit for bit as it would have"
                for name, value in now.items()
                if getattr(manifest, name) != value
            ]
        )

    def _left_out(self, manifest: CheckpointManifest) -> list[str]:
        ours = {name: list(t.size()) for name, t in self.tensors().items()}
        if all(
            ours.get(name) == shape for name, shape in manifest.shapes.items() if shape and is_compression_state(name)
        ):
            return []
        return [
            "the checkpoint was made with other ranks, buckets or compression: what was to be given again of "
            "compressed gradients is left out"
        ]


def _apart(own: dict[str, LocalShard | Tensor], outer: OuterOptimizer) -> dict[str, LocalShard | Tensor]:
    """The state of every replica; who knows nothing of them finds the anchors, and the moments of the first.

    All ranks name the same tensors, but have elements only in those of their own replica.
    """
    held: dict[str, LocalShard | Tensor] = dict(outer.state())
    for replica in range(outer.replicas.count):
        for name, part in own.items():
            alone = replica == 0 and not name.startswith("master/")
            held[name if alone else f"replica-{replica}/{name}"] = (
                part if replica == outer.replicas.replica_index else _none(part)
            )
    return held


def _none(part: LocalShard | Tensor) -> LocalShard:
    """No elements of the same whole."""
    values = part.values if isinstance(part, LocalShard) else part.detach().view(-1)
    return LocalShard(part.shape, 0, values[:0])


def _stored(part: LocalShard | Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    if part.values.numel() == part.shape.numel():
        return part.values.view(part.shape)
    return CheckpointShard.from_values(part.values, part.shape, part.start)


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint in a run's folder of checkpoints."""
    whole = complete_checkpoints(folder)
    return whole[-1][1] if whole else None
