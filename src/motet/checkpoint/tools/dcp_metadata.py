"""Reads `.metadata` of torch's Distributed Checkpoint without executing anything. Nothing here imports torch.

The file is a pickle. A pickle is a program, so this interpreter knows only the instructions that such files have, and
only the classes of the list, in whose place it puts records without behaviour.
"""

import json
import pickle
import struct
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter

from motet.checkpoint.manifest import Shape, TensorName, open_regular, read_limited, validate_json
from motet.checkpoint.safetensors_header import SAFETENSORS_DTYPES
from motet.checkpoint.tensor_index import StoredChunk, tensor_problems
from motet.core.units import DTYPE_BYTES

METADATA_FILE = ".metadata"

_ValueT = TypeVar("_ValueT")
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE),
    *(pickle.BUILD, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)
_MODULE = "torch.distributed.checkpoint"
_RECORDS = {
    *((f"{_MODULE}.metadata", "Metadata"), (f"{_MODULE}.metadata", "MetadataIndex")),
    *((f"{_MODULE}.metadata", "TensorStorageMetadata"), (f"{_MODULE}.metadata", "ChunkStorageMetadata")),
    *((f"{_MODULE}.metadata", "BytesStorageMetadata"), (f"{_MODULE}.metadata", "TensorProperties")),
    *((f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_MODULE}.metadata", "StorageMeta")),
    *((f"{_MODULE}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath")),
}
# Raised by the interpreter, or by the code below, at a file that is not such a pickle.
_ERRORS = (
    *(pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    *(struct.error, RecursionError),
)


class _PickledRecord:
    """An object of a pickle: its arguments and its state, and nothing that it does."""

    state: Any = MappingProxyType({})  # An object without fields is pickled without a state

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _set_items(reader: Any, code: int) -> None:
    """Set items of a dictionary by texts and records. The hash of a deeply nested tuple would end the process."""
    keys = reader.stack[::2] if code == pickle.SETITEMS[0] else reader.stack[-2:-1]
    if not all(isinstance(key, str | _PickledRecord) for key in keys):
        raise TypeError("key")
    pickle._Unpickler.dispatch[code](reader)


class _MetadataInterpreter(pickle._Unpickler):
    """Python's interpreter of pickles, reduced to instructions that build data."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
        **{code[0]: partial(_set_items, code=code[0]) for code in (pickle.SETITEM, pickle.SETITEMS)},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_PickledRecord,), {})
        if module == "torch" and name in DTYPE_BYTES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")


class DcpTensor(NamedTuple):
    """A tensor of a folder of Distributed Checkpoint. A chunk's bytes are a file of `torch.save`."""

    shape: Shape
    dtype: str
    chunks: list[StoredChunk]


_TENSORS = TypeAdapter(dict[TensorName, DcpTensor], config=ConfigDict(strict=True))


def read_dcp_tensors(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of a folder, whose chunks fill them; a `ValueError` says what is wrong."""
    content = _plain_tensors(read_limited(folder / METADATA_FILE))
    tensors = validate_json(_TENSORS, METADATA_FILE, json.dumps(content).encode())
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{METADATA_FILE}: {name} has dtype {tensor.dtype}, which no checkpoint of motet can hold")
        for problem in tensor_problems(name, tensor.shape, tensor.chunks):
            raise ValueError(f"{METADATA_FILE}: {problem}")
    stops = {chunk.file: 0 for tensor in tensors.values() for chunk in tensor.chunks}
    for chunk in (chunk for tensor in tensors.values() for chunk in tensor.chunks):
        stops[chunk.file] = max(stops[chunk.file], chunk.start + chunk.size_bytes)
    for file, stop in stops.items():
        if (size_bytes := (folder / file).stat().st_size) < stop:
            raise ValueError(f"{file} has {size_bytes} bytes, and {METADATA_FILE} speaks of {stop}")
    return tensors


def _plain_tensors(content: bytes) -> dict[str, tuple[list[int], str, list[list[Any]]]]:
    """The fields of a `DcpTensor` for each tensor, not yet validated. Values other than tensors are left out."""
    try:
        metadata = _MetadataInterpreter(BytesIO(content)).load().state
        states = {name: each.state for name, each in metadata["state_dict_metadata"].items()}
        tensors = {name: state for name, state in states.items() if "chunks" in state}
        lengths = {
            (name, *_size(chunk.state["offsets"])): _size(chunk.state["sizes"])
            for name, state in tensors.items()
            for chunk in state["chunks"]
        }
        chunks: dict[str, list[list[Any]]] = {name: [] for name in tensors}
        for index, info in ((key.state, value.state) for key, value in metadata["storage_data"].items()):
            if (name := _typed(str, index["fqn"])) not in tensors:
                continue
            if info.get("transform_descriptors"):
                raise pickle.UnpicklingError(f"{name} is compressed or encrypted by an extension")
            offsets = _size(index["offset"])
            place = _typed(str, info["relative_path"]), _typed(int, info["offset"]), _typed(int, info["length"])
            if all(sizes := lengths.pop((name, *offsets))):  # An empty chunk has no element to read
                chunks[name].append([offsets, sizes, *place, 0])
        return {
            name: (_size(state["size"]), _typed(str, state["properties"].state[0]), chunks[name])
            for name, state in tensors.items()
        }
    except _ERRORS as error:
        reason = str(error) if type(error) is pickle.UnpicklingError else "its content is not what torch writes"
        raise ValueError(f"{METADATA_FILE}: {reason}") from None


def _size(size: Any) -> list[int]:
    return [_typed(int, length) for length in size.arguments[0]]


def _typed(kind: type[_ValueT], value: Any) -> _ValueT:
    """The value if it is a plain one, which neither nests nor repeats itself."""
    if type(value) is not kind:
        raise TypeError(kind)
    return value


def read_chunk_bytes(folder: Path, chunk: StoredChunk) -> bytes:
    """The file of `torch.save` that a chunk is."""
    with open_regular(folder / chunk.file) as file:
        file.seek(chunk.start)
        content = file.read(chunk.size_bytes)
    if len(content) != chunk.size_bytes:
        raise ValueError(f"{chunk.file} ends at byte {chunk.start + len(content)}")
    return content
