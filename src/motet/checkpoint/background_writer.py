"""Saves of a rank that go on while it trains, one at a time. No thread here waits in a collective."""

import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from motet.checkpoint.checkpoint_folders import PARTIAL_SUFFIX, checkpoint_name
from motet.checkpoint.data_files import CheckpointShard, DataFile, DataFileWriter, boxes_of
from motet.checkpoint.manifest import CheckpointManifest
from motet.checkpoint.publication import (
    RankRecord,
    Retention,
    check_dtypes,
    clear_leftovers,
    delete_old,
    looks_at,
    publish,
    wait_for_records,
    write_record,
)
from motet.checkpoint.safetensors_header import DataBox
from motet.checkpoint.write_barrier import BoxToWrite, WriteBarrier
from motet.checkpoint.writers import convert_save_errors
from motet.core.errors import CheckpointSaveError, MotetError, PeerFailedError, TrainingDivergedError, convert_os_errors
from motet.core.units import dtype_name
from motet.memory.tiers.device_limit import host_memory

# Elements that are looked at together; more would start further threads of torch.
_FINITE_NUMEL = 1 << 15

ResultT = TypeVar("ResultT")


def on_all_ranks(group: dist.ProcessGroup | None, action: Callable[[], ResultT]) -> ResultT:
    """Call the action on every rank. An error of one for the user is raised on all of them."""
    result, failure = None, None
    try:
        result = action()
    except MotetError as error:
        failure = error
    failures: list[MotetError | None] = [failure]
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
    if any(failures):  # The cause before its effect on another rank
        raise min(filter(None, failures), key=lambda error: isinstance(error, PeerFailedError))
    return result  # type: ignore[return-value]  # without an error it is the action's result


@dataclass(frozen=True)
class ShardToWrite:
    """The boxes of a tensor that this rank writes, and the slice of the optimizer whose update changes them."""

    shard: CheckpointShard
    slice_index: int | None = None
    is_copied: bool = False  # When the save begins, since no slice tells when it changes
    must_be_finite: bool = False


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that has its name."""

    step: int
    path: Path
    size_bytes: int  # Tensors of the model and its optimizer
    duration_s: float
    stall_s: float  # The longest time that a rank waited instead of training
    copied_bytes: int  # On all ranks


class _RankSave:
    """One save on this rank, in a thread; on the first rank it also makes the checkpoint complete."""

    def __init__(
        self,
        saver: "CheckpointSaver",
        manifest: CheckpointManifest,
        shards: Mapping[str, ShardToWrite],
        *,
        waited_s: float,
    ) -> None:
        self._saver, self.manifest = saver, manifest
        self._shapes = {name: list(each.shard.spec.shape) for name, each in shards.items()}
        self._dtypes = {name: dtype_name(each.shard.values.dtype) for name, each in shards.items()}
        self._finite_names = {name for name, each in shards.items() if each.must_be_finite}
        self.final = saver.folder / checkpoint_name(manifest.step)
        self.unfinished = self.final.with_name(self.final.name + PARTIAL_SUFFIX)
        self.waited_s, self.is_reported = waited_s, False
        self._start_s = time.perf_counter() - waited_s
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None
        self.is_written, self.is_done, self.patience_s = Event(), Event(), math.inf
        boxes = [
            BoxToWrite(box, self._values(shards[box.name], box), shards[box.name].slice_index)
            for box in boxes_of({name: each.shard for name, each in shards.items()})
        ]
        self._copied_bytes = sum(each.values.nbytes for each in boxes if shards[each.box.name].is_copied)
        self.barrier = WriteBarrier(
            boxes, saver.device, staging_bytes=saver.staging_bytes, in_files=saver.slices_are_in_files
        )
        self._thread = Thread(target=self._run, name="motet-checkpoint", daemon=True)

    def _values(self, each: ShardToWrite, box: DataBox) -> Tensor:
        values = each.shard.box_values(box.offsets)
        if not each.is_copied:
            return values
        with host_memory(self._saver.device):  # The device may have no room
            return values.to("cpu", copy=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), convert_save_errors(self.final, self.manifest.size_bytes):
                record = self._write()
                if self._saver.rank:
                    write_record(self.unfinished, self._saver.rank, record)
                self.is_written.set()
                if not self._saver.rank:
                    self._publish(record)
        except BaseException as error:  # noqa: BLE001  # The thread that trains raises it
            self.error = error
            if self._saver.rank:
                with suppress(OSError):  # It may be the disk that is full
                    problem = str(error) if isinstance(error, MotetError) else repr(error)
                    write_record(self.unfinished, self._saver.rank, RankRecord(None, 0, {}, problem=problem))
        finally:
            self.barrier.open()
            self.is_written.set()
            self.is_done.set()

    def _write(self) -> RankRecord:
        self.unfinished.parent.mkdir(exist_ok=True)
        self.unfinished.mkdir(exist_ok=True)  # Another rank may have come first
        path, file = self.unfinished / f"rank-{self._saver.rank:05d}.safetensors", DataFile(0, {})
        if to_write := {each.box: each for each in self.barrier.boxes}:
            with DataFileWriter(path, to_write) as writer:
                for box in writer.boxes:
                    with self.barrier.reading(to_write[box]) as values:
                        if box.name in self._finite_names:
                            self._check_finite(values)
                        writer.write_box(box, values)
                file = writer.finish()
        copied_bytes, stall_s = self._copied_bytes + self.barrier.copied_bytes, self.barrier.stall_s
        return RankRecord(path.name if to_write else None, *file, self._shapes, self._dtypes, copied_bytes, stall_s)

    def _check_finite(self, values: Tensor) -> None:
        if not all(part.isfinite().all() for part in values.reshape(-1).split(_FINITE_NUMEL)):
            raise TrainingDivergedError(
                f"stopped: the parameters are not finite after step {self.manifest.step}, so they are not saved; lower "
                "optimizer.learning_rate or lengthen the warm-up, then start again (--resume continues from the last "
                "checkpoint, if there is one)"
            )

    def _publish(self, first: RankRecord) -> None:
        saver = self._saver
        records = [first, *wait_for_records(self.unfinished, saver.ranks, lambda: self.patience_s)]
        publish(self.unfinished, self.final, manifest=self.manifest, records=records)
        delete_old(saver.folder, saver.retention)
        self.saved = SavedCheckpoint(
            self.manifest.step,
            self.final,
            self.manifest.size_bytes,
            duration_s=time.perf_counter() - self._start_s,
            stall_s=max(record.stall_s for record in records),
            copied_bytes=sum(record.copied_bytes for record in records),
        )

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class CheckpointSaver:
    """Saves the checkpoints of a run on this rank, one at a time."""

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None,
        retention: Retention,
        *,
        device: torch.device,
        staging_bytes: int = 2**28,
        slices_are_in_files: bool = False,
    ) -> None:
        """`staging_bytes` limits pinned copies of values of a GPU. Slices of the optimizer `are_in_files` if their
        values are read from a disk, so that they are not copied."""
        self.folder, self._group, self.retention, self.device = folder, group, retention, device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.staging_bytes, self.slices_are_in_files = staging_bytes, slices_are_in_files
        self._save: _RankSave | None = None

    def clear(self) -> None:
        """Clear the rests of interrupted saves and old checkpoints; every rank calls it."""

        def clear() -> None:
            if self.rank == 0:
                remedy = "make the folder writable, then --resume"
                with convert_os_errors(f"clear {self.folder}", remedy, CheckpointSaveError):
                    clear_leftovers(self.folder)
                    delete_old(self.folder, self.retention)

        on_all_ranks(self._group, clear)

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._save is not None and not self._save.is_done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the save that is under way has failed on this rank; `finish` raises its error on all."""
        return self._save is not None and self._save.error is not None

    def start(self, manifest: CheckpointManifest, shards: Mapping[str, ShardToWrite], *, waited_s: float = 0.0) -> Path:
        """Begin to write the shards of this rank. Those with a slice may change after `before_update` of it, others
        may not. `waited_s` are the seconds that the preparation took. Returns the folder that the checkpoint gets."""
        assert self._save is None, "a save is under way"
        check_dtypes(manifest)
        start_s = time.perf_counter()
        self._save = _RankSave(self, manifest, shards, waited_s=waited_s)
        self._save.start()
        self._save.waited_s += time.perf_counter() - start_s
        return self._save.final

    def before_update(self, slices: Collection[int]) -> None:
        """Wait until an update may change these slices of the optimizer."""
        if (save := self._save) is not None:
            save.barrier.before_update(slices)

    def take_saved(self) -> SavedCheckpoint | None:
        """The checkpoint of a save that has ended well on this rank, once; only the first rank has one."""
        save = self._save
        if save is None or save.saved is None or save.is_reported:
            return None
        save.is_reported = True
        return replace(save.saved, stall_s=save.waited_s + save.saved.stall_s)

    def finish(self) -> SavedCheckpoint | None:
        """Wait until the checkpoint is complete. Every rank calls it, and all raise the first error of one. The first
        rank gets the checkpoint, unless `take_saved` had it."""
        if (save := self._save) is None:
            return None
        start_s = time.perf_counter()
        save.is_written.wait()
        try:
            on_all_ranks(self._group, save.raise_error)
            save.is_done.wait()
            on_all_ranks(self._group, save.raise_error)
        except BaseException:
            self._save = None
            self._abandon(save)
            raise
        save.waited_s += time.perf_counter() - start_s
        saved = self.take_saved()
        self._save = None
        return saved

    def close(self, *, patience_s: float = 30.0) -> SavedCheckpoint | None:
        """End the save that is under way, without messages to other ranks: they are waited for while they write. The
        first rank gets the checkpoint, unless `take_saved` had it."""
        if (save := self._save) is None:
            return None
        save.patience_s = patience_s
        save.is_done.wait()
        if save.error is not None:
            self._remove(save)
        elif self.rank:  # The first rank would end with this one
            for _ in looks_at(save.unfinished, lambda: patience_s):
                if not save.unfinished.exists():
                    break
        saved = self.take_saved()
        self._save = None
        return saved

    def _abandon(self, save: _RankSave) -> None:
        save.patience_s = 0.0
        save.is_done.wait()
        self._remove(save)

    def _remove(self, save: _RankSave) -> None:
        if self.rank == 0:
            shutil.rmtree(save.unfinished, ignore_errors=True)  # Frees space for other files


def save_checkpoint(
    folder: Path,
    shards: Mapping[str, CheckpointShard],
    manifest: CheckpointManifest,
    *,
    keep: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """Save shards in the memory of a CPU, and wait; every rank calls it. Returns the folder of the checkpoint."""
    saver = CheckpointSaver(folder, group, Retention(keep), device=torch.device("cpu"))
    saver.clear()
    path = saver.start(manifest, {name: ShardToWrite(shard) for name, shard in shards.items()})
    saver.finish()
    return path
