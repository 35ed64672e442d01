"""Values of motet's decoder from a folder of Hugging Face, and rows of its tensors in the form of such a folder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.models.hf.decoder_files import FolderTensors
from motet.models.hf.decoder_tensors import FolderPart
from motet.models.hf.hf_weights import read_box
from motet.models.hf.safetensors_files import WeightOnDisk, fingerprint_of
from motet.models.parameter_values import BoxReader
from motet.models.weight_init import TensorBox


def to_folder(part: FolderPart, rows: Tensor) -> Tensor:
    """Rows of motet's tensor, which are whole heads where the part has heads, as the folder has them."""
    if part.head_dim is not None:
        rows = rows.unflatten(0, (-1, part.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return rows.T if part.is_transposed else rows


def from_folder(part: FolderPart, values: Tensor) -> Tensor:
    """The inverse of `to_folder`."""
    rows = values.T if part.is_transposed else values
    if part.head_dim is not None:
        rows = rows.unflatten(0, (-1, 2, part.head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return rows


class DecoderFolderValues:
    """The values of a decoder's parameters, read by boxes from the files of a folder, in float32 at least."""

    def __init__(self, tensors: FolderTensors) -> None:
        self._tensors, self.fingerprint = tensors, fingerprint_of(tensors.on_disk.values())

    def open(self, name: str) -> BoxReader:
        parts = self._tensors.mapped.parts[name]
        weights = [self._tensors.on_disk[part.name] for part in parts]
        return lambda box: read_parts(parts, weights, box)


def read_parts(parts: Sequence[FolderPart], weights: Sequence[WeightOnDisk], box: TensorBox) -> Tensor:
    """A box of a tensor of motet, from the rows of its parts that the box needs."""
    (first, *offsets), (rows, *lengths) = box
    pieces = []
    for part, weight in zip(parts, weights, strict=True):
        start, stop = max(first, part.first_row), min(first + rows, part.first_row + part.rows)
        if start < stop:
            inner = (start - part.first_row, *offsets), (stop - start, *lengths)
            pieces.append(read_part(part, weight, inner))
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return joined.to(torch.promote_types(joined.dtype, torch.float32))


def read_part(part: FolderPart, weight: WeightOnDisk, box: TensorBox) -> Tensor:
    """A box of the rows of motet's tensor that a tensor of the folder holds. Complete heads are read."""
    (first, *offsets), (rows, *lengths) = box
    unit = part.head_dim or 1
    base = first // unit * unit
    inner = (base, *offsets), (-(-(first + rows) // unit) * unit - base, *lengths)
    inner = (inner[0][::-1], inner[1][::-1]) if part.is_transposed else inner
    return from_folder(part, read_box(weight, inner))[first - base : first - base + rows]
