"""Reads a folder of torch's Distributed Checkpoint as the tensors of a checkpoint of motet.

`.metadata` is a pickle that is read without executing it; the data are files of `torch.save`, which `torch.load` reads
as weights alone.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.tensor_index import Box, StoredChunk, box_slices
from motet.checkpoint.tools.dcp_metadata import METADATA_FILE, DcpTensor, read_chunk_bytes, read_dcp_tensors
from motet.checkpoint.tools.dcp_names import MODEL_KINDS
from motet.core.errors import InputError, check_input
from motet.core.units import dtype_name

# The keys of a state dict under which programs keep a module and its optimizer; "" is the state dict itself.
_MODEL_KEYS = ("model", "app.model", "module", "state_dict", "")
_OPTIMIZER_KEYS = ("optimizer", "optim", "app.optimizer", "app.optim", "")
_MOMENT = re.compile(r"state\.(?P<name>.+)\.(?P<kind>exp_avg|exp_avg_sq|momentum_buffer|step)")
# Raised by `torch.load` at bytes that are not a tensor.
_LOAD_ERRORS = (
    *(RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, AssertionError, ImportError, OSError),
)


@contextmanager
def refuse_dcp_damage(folder: Path) -> Iterator[None]:
    """Raise a problem that the block finds in a folder as one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = f"{Path(error.filename or '').name}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise InputError(
            f"cannot read {folder} as a folder of torch.distributed.checkpoint ({reason[:400]}); save it again"
        ) from None


@dataclass(frozen=True)
class DcpSource:
    """The tensors of a folder by their names in a checkpoint of motet."""

    folder: Path
    tensors: Mapping[str, DcpTensor]
    count: Tensor | None = None  # The steps that the optimizer has taken

    def find(self, name: str) -> DcpTensor | None:
        """A tensor by its name in a checkpoint; a folder does not say whether a parameter is trained."""
        kind, _, rest = name.partition("/")
        kinds = MODEL_KINDS if kind in MODEL_KINDS else (kind,)
        return next((self.tensors[f"{each}/{rest}"] for each in kinds if f"{each}/{rest}" in self.tensors), None)

    def boxes(self, name: str) -> list[Box] | None:
        """The boxes in which a tensor is stored; None if it is not there."""
        tensor = self.find(name)
        return [chunk.box for chunk in tensor.chunks] if tensor else None


def read_dcp_chunk(folder: Path, name: str, *, tensor: DcpTensor, chunk: StoredChunk) -> Tensor:
    """The elements of a chunk; everything of it is in memory."""
    with refuse_dcp_damage(folder):
        content = read_chunk_bytes(folder, chunk)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of pickles that it then refuses
                values: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except _LOAD_ERRORS as error:
            raise ValueError(f"{chunk.file}: {name} is not a tensor of torch ({type(error).__name__})") from None
        is_dense = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_quantized
        if not is_dense or (dtype_name(values.dtype), tuple(values.shape)) != (tensor.dtype, chunk.lengths):
            raise ValueError(f"{chunk.file}: {name} is not the tensor of {METADATA_FILE}")
        tensor_values: Tensor = values.detach()
        return tensor_values


class DcpBoxReader:
    """Reads boxes inside of chunks, and keeps the chunk that it read last."""

    def __init__(self, source: DcpSource, dtypes: Mapping[str, str]) -> None:
        self._source, self._dtypes = source, dtypes
        self._last: tuple[str, StoredChunk, Tensor] | None = None

    def __call__(self, name: str, box: Box) -> Tensor:
        dtype: torch.dtype = getattr(torch, self._dtypes[name])
        if name == "step" and self._source.count is not None:
            return self._source.count.to(dtype)
        if (tensor := self._source.find(name)) is None:  # The optimizer has no state yet
            return torch.zeros(box[1], dtype=dtype)
        chunk = next(
            chunk
            for chunk in tensor.chunks
            if all(at <= first and first + n <= at + m for at, m, first, n in zip(*chunk.box, *box, strict=True))
        )
        if self._last is None or self._last[:2] != (name, chunk):
            self._last = None  # Frees it before the next is read
            self._last = name, chunk, read_dcp_chunk(self._source.folder, name, tensor=tensor, chunk=chunk)
        return self._last[2][box_slices(box, chunk.offsets)].to(dtype)


def open_dcp(folder: Path, *, model: str | None = None, optimizer: str | None = None) -> DcpSource:
    """The module and the optimizer in a folder; `model` and `optimizer` are their keys in its state dict.

    Tensors without moments are frozen parameters or buffers if others have some.
    """
    with refuse_dcp_damage(folder):
        tensors = read_dcp_tensors(folder)
    moments, steps = _moments(tensors, optimizer)
    parameters = _parameters([key for key in tensors if key not in {*moments.values(), *steps}], model)
    firsts = sorted({key.partition(".")[0] for key in tensors})
    check_input(
        parameters,
        f"{folder} has no parameter{f' under {model!r}' if model else ''}: its keys begin with {firsts[:9]}; give the "
        "key of the module by --model",
    )
    check_input(
        moments or steps or not optimizer, f"{folder} has no moments under {optimizer!r}; leave --optimizer out"
    )
    trained = {name.partition("/")[2] for name in moments}
    named = {f"{_kind(name, tensors[key], trained)}/{name}": tensors[key] for name, key in parameters.items()}
    named |= {name: tensors[key] for name, key in moments.items()}
    source = DcpSource(folder, named)
    return replace(source, count=_common_step(folder, {key: tensors[key] for key in steps}))


def _kind(name: str, tensor: DcpTensor, trained: Collection[str]) -> str:
    if not getattr(torch, tensor.dtype).is_floating_point:
        return "buffer"
    return "master" if name in trained or not trained else "frozen"


def _moments(tensors: Mapping[str, DcpTensor], optimizer: str | None) -> tuple[dict[str, str], list[str]]:
    """Our name of each moment -> its key, and the keys of counts of steps."""
    for start in map(_prefix, _OPTIMIZER_KEYS if optimizer is None else [optimizer]):
        matches = [(key, _MOMENT.fullmatch(key, len(start))) for key in tensors if key.startswith(start)]
        by_key = {key: match for key, match in matches if match}
        if by_key:
            steps = [key for key, match in by_key.items() if match["kind"] == "step"]
            moments = {f"{match['kind']}/{match['name']}": key for key, match in by_key.items() if key not in {*steps}}
            return moments, steps
    return {}, []


def _parameters(keys: Sequence[str], model: str | None) -> dict[str, str]:
    """The name of each tensor of the module -> its key."""
    for start in map(_prefix, _MODEL_KEYS if model is None else [model]):
        if named := {key.removeprefix(start): key for key in keys if key.startswith(start) and key != start}:
            return named
    return {}


def _prefix(key: str) -> str:
    return f"{key}." if key else ""


def _common_step(folder: Path, counts: Mapping[str, DcpTensor]) -> Tensor | None:
    """The count of steps of all parameters, which is one number in motet."""
    common, first = None, ""
    for key, tensor in counts.items():
        check_input(
            not tensor.shape and tensor.chunks, f"{folder}: {key} has shape {tensor.shape}, and must be one number"
        )
        count = read_dcp_chunk(folder, key, tensor=tensor, chunk=tensor.chunks[0])
        check_input(
            not count.is_complex() and 0 <= count.item() < 2**53,
            f"{folder}: {key} is {count.item()}, and must be a count of steps",
        )
        if common is None:
            common, first = count, key
        check_input(
            count == common,
            f"{folder}: {key} is {count.item():g} and {first} is {common.item():g}; all parameters must have taken the "
            "same steps",
        )
    return common


def manifest_of_dcp(source: DcpSource, *, step: int | None, like: CheckpointManifest | None) -> CheckpointManifest:
    """The manifest of the imported checkpoint: that of a run's checkpoint, if one is given, or the folder's tensors."""
    step = step if step is not None else 0 if source.count is None else int(source.count.item())
    check_input(
        0 <= step < 2**53, f"{source.folder}: a checkpoint of step {step} cannot be; give another one by --step"
    )
    if like is None:
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
        if source.count is not None:
            shapes["step"], dtypes["step"] = [], dtype_name(source.count.dtype)
        return CheckpointManifest(step, "", shapes, dtypes, SavedBy(1, 1, torch.__version__))
    for name, shape in like.shapes.items():
        tensor = source.find(name)
        is_needed = name.startswith(("master/", "frozen/", "buffer/"))
        check_input(
            tensor or not is_needed,
            f"{source.folder} has no {name.partition('/')[2]}, which the model of --like has; give the folder of that "
            "model, or the key of its module by --model",
        )
        check_input(
            tensor is None or tensor.shape == shape,
            f"{source.folder}: {name} is {tensor.shape if tensor else None}, and {shape} in the checkpoint of --like",
        )
    return replace(like, step=step)
