"""Makes a checkpoint of others: their mean, or one with another master dtype. A few megabytes are in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from motet.checkpoint.checkpoint_folders import PARTIAL_SUFFIX, checkpoint_name
from motet.checkpoint.data_files import DataFile, DataFileWriter
from motet.checkpoint.manifest import CheckpointManifest
from motet.checkpoint.publication import RankRecord, publish
from motet.checkpoint.reader import CheckpointReader
from motet.checkpoint.safetensors_header import DataBox
from motet.checkpoint.tensor_index import Box
from motet.checkpoint.tools.boxes import cut_box
from motet.checkpoint.verification import verify_files
from motet.core.errors import InputError, check_input
from motet.core.units import dtype_name

_MAX_FILE_BYTES = 2**34
# Reads a box of a tensor by its name.
BoxReader = Callable[[str, Box], Tensor]
ByteReporter = Callable[[int], None]


def write_checkpoint(
    folder: Path,
    manifest: CheckpointManifest,
    read: BoxReader,
    *,
    report: ByteReporter,
    stored_boxes: Callable[[str], Sequence[Box] | None] = lambda _: None,
) -> Path:
    """Write `step-N` into a folder of checkpoints; `read` gives the values of the manifest's tensors.

    It is asked for boxes inside of the `stored_boxes` of a tensor, if it has some, in their order.
    """
    final = folder / checkpoint_name(manifest.step)
    unfinished = final.with_name(final.name + PARTIAL_SUFFIX)
    unfinished.mkdir()
    records = list[RankRecord]()
    for i, boxes in enumerate(_boxes_by_file(manifest, stored_boxes)):
        name = f"rank-{i:05d}.safetensors"
        file = _write_file(unfinished / name, boxes, read, report=report)
        records.append(RankRecord(name, *file))
    publish(unfinished, final, manifest=manifest, records=records)
    return final


def _boxes_by_file(
    manifest: CheckpointManifest, stored_boxes: Callable[[str], Sequence[Box] | None]
) -> Iterator[list[DataBox]]:
    boxes, size_bytes = list[DataBox](), 0
    for name, lengths in manifest.shapes.items():
        shape = tuple(lengths)
        stored = stored_boxes(name) or [((0,) * len(shape), shape)]
        for box in (part for each in stored for part in cut_box(each)):
            boxes.append(DataBox(name, manifest.dtypes[name], shape, *box))
            size_bytes += boxes[-1].size_bytes
            if size_bytes >= _MAX_FILE_BYTES:
                yield boxes
                boxes, size_bytes = [], 0
    if boxes:
        yield boxes


def _write_file(path: Path, boxes: Sequence[DataBox], read: BoxReader, *, report: ByteReporter) -> DataFile:
    with DataFileWriter(path, boxes) as writer:
        for box in writer.boxes:
            values = read(box.name, (box.offsets, box.lengths))
            assert dtype_name(values.dtype) == box.dtype, (box.name, values.dtype)
            writer.write_box(box, values)
            report(box.size_bytes)
        return writer.finish()


def verify_source(checkpoint: CheckpointReader) -> None:
    """Refuse a checkpoint with a changed byte, before anything is made of it."""
    verify_files(checkpoint.path, checkpoint.manifest, checkpoint.index)


def without_layout(manifest: CheckpointManifest) -> CheckpointManifest:
    """The manifest without state with which only the same layout can continue, and without files."""
    saved_by = replace(manifest.saved_by, outer={}, shapes={}, dtypes={})
    return replace(manifest, saved_by=saved_by, checksums={}, sizes={})


# --- the mean ------------------------------------------------------------------------------------------


def check_same_tensors(checkpoints: Sequence[CheckpointReader]) -> None:
    """Refuse checkpoints of different models."""
    first, *others = checkpoints
    for other in others:
        a, b = first.manifest.shapes, other.manifest.shapes
        for name in sorted({*a, *b}):
            state_a, state_b = (f"of {m[name]}" if name in m else "missing" for m in (a, b))
            check_input(
                state_a == state_b,
                f"{name!r} is {state_a} in {first.path} and {state_b} in {other.path}; checkpoints of one model alone "
                "have a mean",
            )


def average_reader(checkpoints: Sequence[CheckpointReader]) -> BoxReader:
    """Reads the mean of parameters and floating-point buffers, computed in float64, and the last of everything else."""
    last = checkpoints[-1]

    def read(name: str, box: Box) -> Tensor:
        kind, _, rest = name.partition("/")
        if kind not in ("master", "frozen", "buffer") or not rest or not last.dtype(name).is_floating_point:
            return last.read_box(name, box)
        first = checkpoints[0].read_box(name, box).double()
        # Differences from the first: the mean of equal values is that value, in any dtype.
        total = torch.zeros_like(first)
        for other in checkpoints[1:]:
            total += other.read_box(name, box).double() - first
        return (first + total / len(checkpoints)).to(last.dtype(name))

    return read


# --- another dtype -------------------------------------------------------------------------------------


def cast_dtypes(manifest: CheckpointManifest, dtype: str) -> dict[str, str]:
    """The dtypes of all tensors where masters, and moments of the same dtype as their masters, have another one."""
    dtypes = dict(manifest.dtypes)
    for name, before in manifest.dtypes.items():
        _, _, parameter = name.partition("/")
        is_floating = getattr(torch, before).is_floating_point
        if is_floating and not name.startswith(("frozen/", "buffer/")):
            dtypes[name] = dtype if before == manifest.dtypes.get(f"master/{parameter}") else before
    return dtypes


def cast_reader(checkpoint: CheckpointReader, dtypes: Mapping[str, str]) -> BoxReader:
    """Reads values rounded to their new dtypes. A finite one must not become infinite."""

    def read(name: str, box: Box) -> Tensor:
        values = checkpoint.read_box(name, box)
        cast = values.to(getattr(torch, dtypes[name]))
        if cast.dtype != values.dtype and bool((cast.isinf() & ~values.isinf()).any()):
            largest = values[values.isfinite()].abs().max().item()
            raise InputError(f"{name} has {largest:.3g}, more than {dtypes[name]} holds; cast to a wider dtype")
        return cast

    return read
