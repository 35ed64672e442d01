"""The state of a run as named tensors, and its way to a checkpoint and back."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from motet.checkpoint.load import load_checkpoint
from motet.checkpoint.manifest import Manifest, whole_checkpoints
from motet.checkpoint.pieces import StoredPiece
from motet.checkpoint.save import save_checkpoint
from motet.collectives.execute import sum_scalars
from motet.core.errors import DivergedError, InputError
from motet.parallel.data import agree_on_buffers, saved_buffers
from motet.parallel.full import kept
from motet.parallel.group import Group
from motet.parallel.spread import Piece
from motet.train.optimizer import Updater


@dataclass(frozen=True)
class RunState:
    """Everything that a checkpoint holds. Randomness needs no state: it follows from the seed and the step."""

    module: nn.Module
    updater: Updater
    group: Group
    folder: Path
    """Of the checkpoints."""
    keep: int
    data_fingerprint: str

    def tensors(self) -> dict[str, Tensor]:
        """By name, as views: reading them saves the run, writing to them restores it."""
        held = {name: _stored(part) for name, part in self.updater.state().items()}
        frozen = {f"frozen/{n}": _stored(kept(p)) for n, p in self.module.named_parameters() if not p.requires_grad}
        buffers = {f"buffer/{n}": b.detach() for n, b in saved_buffers(self.module).items()}
        return held | frozen | buffers

    def save(self, step: int) -> tuple[Path, int]:
        """The folder of the checkpoint, and its bytes."""
        wrong = float(not all(master.isfinite().all() for master in self.updater.spread.masters))
        if sum_scalars([wrong], self.group, self.group.device)[0]:
            raise DivergedError(
                f"stopped at step {step}: the parameters are not finite after it, so they are not saved; lower "
                "optimizer.learning_rate or lengthen the warm-up, then start again (--resume continues from the last "
                "checkpoint, if there is one)"
            )
        agree_on_buffers(self.module, self.group)
        tensors = self.tensors()
        manifest = Manifest(
            step=step,
            ranks=self.group.world,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            data_fingerprint=self.data_fingerprint,
            shapes={name: list(t.size()) for name, t in tensors.items()},
            dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        )
        path = save_checkpoint(self.folder, tensors, manifest, self.keep, self.group.process_group)
        return path, sum(t.nbytes for t in tensors.values())

    def restore(self, where: Path) -> tuple[int, list[str]]:
        """The step that the checkpoint was made after, and what a person should know about continuing from it."""
        manifest = load_checkpoint(where, self.tensors(), self.group.process_group)
        if manifest.data_fingerprint != self.data_fingerprint:
            raise InputError(
                f"the data changed since checkpoint {where.name} was made (fingerprint {manifest.data_fingerprint} "
                f"then, {self.data_fingerprint} now), so the run would see other samples; restore the data (`stdlib` "
                "differs between Python versions) or start in another run folder"
            )
        self.updater.publish()
        return manifest.step, self._changes(manifest)

    def _changes(self, manifest: Manifest) -> list[str]:
        """What changed that alters the order of additions, and so the last bits."""
        now = {"ranks": self.group.world, "threads": torch.get_num_threads(), "torch": torch.__version__}
        return [
            f"the checkpoint was made with {name} = {getattr(manifest, name)}, this run has {value}: it continues, "
            "but not bit for bit as it would have"
            for name, value in now.items()
            if getattr(manifest, name) != value
        ]


def _stored(part: Piece | Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    if part.values.numel() == part.shape.numel():
        return part.values.view(part.shape)
    return StoredPiece.of(part.values, part.shape, part.start)


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint in a run's folder of checkpoints."""
    whole = whole_checkpoints(folder)
    return whole[-1][1] if whole else None
