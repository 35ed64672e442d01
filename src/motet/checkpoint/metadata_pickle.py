"""Reading `.metadata`, which earlier versions wrote with torch's Distributed Checkpoint, without executing anything.

The file is a pickle. A pickle is a program, so this interpreter knows only the instructions that such files have, and
only the classes of the list, in whose place it puts records without behaviour. Nothing of torch is imported or called.
"""

import pickle
import struct
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, TypeVar

from motet.checkpoint.manifest import METADATA_FILE, CheckpointManifest
from motet.core.dtypes import DTYPE_BYTES

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
    *((f"{_MODULE}.metadata", "TensorProperties"), (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING")),
    *((f"{_MODULE}.metadata", "StorageMeta"), (f"{_MODULE}.filesystem", "_StorageInfo")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
}
# What a file that is not such a pickle makes the interpreter or the code below raise.
_ERRORS = (
    *(pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    struct.error,
)


class _PickledRecord:
    """An object of a pickle: its arguments and its state, and nothing that it does."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, dict[str, Any]()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _set_items(reader: Any, code: int) -> None:
    """Set items of a dictionary by texts and records. The hash of a deeply nested tuple would end the process."""
    keys = reader.stack[::2] if code == pickle.SETITEMS[0] else reader.stack[-2:-1]
    if not all(isinstance(key, str | _PickledRecord) for key in keys):
        raise TypeError("key")
    pickle._Unpickler.dispatch[code](reader)


class _MetadataReader(pickle._Unpickler):
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


def chunks_of_metadata(content: bytes, manifest: CheckpointManifest) -> dict[str, list[list[Any]]]:
    """The fields of a `StoredChunk` for each chunk, by tensor, not yet validated."""
    try:
        metadata = _MetadataReader(BytesIO(content)).load().state
        tensors: Mapping[str, Any] = {name: each.state for name, each in metadata["state_dict_metadata"].items()}
        stored = {
            name: (_size(each["size"]), _typed(str, each["properties"].state[0])) for name, each in tensors.items()
        }
        lengths = {
            (name, *_size(chunk.state["offsets"])): _size(chunk.state["sizes"])
            for name, each in tensors.items()
            for chunk in each["chunks"]
        }
        by_name: dict[str, list[list[Any]]] = {}
        for index, info in ((key.state, value.state) for key, value in metadata["storage_data"].items()):
            name, offsets = _typed(str, index["fqn"]), _size(index["offset"])
            place = _typed(str, info["relative_path"]), _typed(int, info["offset"]), _typed(int, info["length"])
            by_name.setdefault(name, []).append([offsets, lengths.pop((name, *offsets)), *place])
    except _ERRORS as error:
        reason = str(error) if type(error) is pickle.UnpicklingError else "its content is not what torch writes"
        raise ValueError(f"{METADATA_FILE}: {reason}") from None
    for name, (shape, dtype) in stored.items():
        expected = manifest.all_shapes.get(name), manifest.all_dtypes.get(name)
        if (shape, dtype) != expected:
            raise ValueError(
                f"{METADATA_FILE}: {name!r} is {shape} of {dtype}, and in the manifest {expected[0]} of {expected[1]}"
            )
    return by_name


def _size(size: Any) -> list[int]:
    return [_typed(int, length) for length in size.arguments[0]]


def _typed(kind: type[_ValueT], value: Any) -> _ValueT:
    """The value if it is a plain one, which neither nests nor repeats itself."""
    if type(value) is not kind:
        raise TypeError(kind)
    return value
