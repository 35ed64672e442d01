"""The files of a folder of Hugging Face that a run of motet's decoder starts from, checked before ranks start.

Nothing here imports torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.models.hf.decoder_config import check_decoder_folder
from motet.models.hf.decoder_tensors import DecoderTensors, map_decoder_tensors
from motet.models.hf.safetensors_files import HEADER_ERRORS, WeightOnDisk, have_equal_bytes, read_weight_headers
from motet.models.settings import DecoderSettings

# Tensors that old files have and that hold no parameter; transformers ignores them, too.
_IGNORED = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class FolderTensors:
    """The tensors of a decoder, and where each of their parts is on disk."""

    mapped: DecoderTensors
    on_disk: dict[str, WeightOnDisk]  # By the name of the part


def find_decoder_tensors(settings: DecoderSettings) -> FolderTensors:
    """The tensors in the folder of `model.weights`. Refuse a folder that is not of this decoder."""
    assert settings.weights is not None
    folder = Path(settings.weights).expanduser()
    place = f"model.weights = {settings.weights!r}"
    model_type = check_decoder_folder(settings, folder)
    headers = _read_headers(folder, place)
    bare = settings.model_copy(update={"adapters": None, "frozen": ()})
    mapped = map_decoder_tensors(bare, model_type)
    parts = {part.name: part for _, part in mapped.in_folder()}
    base = next(iter(parts)).partition(".")[0] + "."  # Files of a model without its head have names without it
    names = {name: name if name in parts or base + name not in parts else base + name for name in headers}
    on_disk = {names[name]: weight for name, weight in headers.items()}
    check_input(len(on_disk) == len(headers), f"{place}: a tensor is there with two names; save the model again")
    for name, part in parts.items():
        check_input(name in on_disk, f"{place}: there is no {name}; give a folder with the whole model")
        shape = on_disk[name].shape
        problem = f"{place}: {name} has the shape {list(shape)} and must have {list(part.shape)}"
        check_input(shape == part.shape, f"{problem}; give the folder of another model")
    for name in sorted(on_disk.keys() - parts.keys()):
        table = on_disk[next(iter(parts))]
        is_copy = settings.tied and name == _HEAD and have_equal_bytes(on_disk[name], table)
        check_input(
            is_copy or _IGNORED.search(name),
            f"{place}: the decoder has no tensor for {name}; set model.tied=false"
            if name == _HEAD
            else f"{place}: the decoder has no tensor for {name}; give the folder of another model",
        )
    return FolderTensors(mapped, {name: on_disk[name] for name in parts})


def _read_headers(folder: Path, place: str) -> Mapping[str, WeightOnDisk]:
    has_pickle = any(folder.glob("pytorch_model*.bin*"))
    remedy = "save its pickled weights as safetensors" if has_pickle else "give a folder with safetensors files"
    try:
        with convert_os_errors(f"read the weights in {folder}", remedy):
            return read_weight_headers(folder)
    except InputError:
        raise
    except HEADER_ERRORS as error:
        problem = f"a safetensors file there is damaged ({type(error).__name__}: {error})"
        raise InputError(f"{place}: {problem}; copy it again") from None
