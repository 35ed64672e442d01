"""A checkpoint as a folder of Hugging Face: weights, config, and the tokenizer of its run."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from motet.checkpoint.reader import CheckpointReader
from motet.core.direct_io import check_free_space
from motet.core.errors import InputError, check_input
from motet.core.new_folders import new_folder
from motet.core.text_files import parse_json
from motet.core.trace import log_if_slow, progress_if_slow
from motet.data.corpus.prepare import find_tokenizer
from motet.data.corpus.tokenizer import Tokenizer
from motet.export.decoder_export import exported_decoder
from motet.export.hf_module_export import exported_module, module_without_memory
from motet.export.peft_export import ExportedAdapters, decoder_adapters, module_adapters, write_adapters
from motet.export.safetensors_shards import ExportedTensor, write_shards
from motet.export.stored_parameters import StoredParameters
from motet.models.hf.hf_model import open_hf_checkpoint, silence_transformers
from motet.models.settings import DecoderSettings, ModelSettings, UserModuleSettings
from motet.train.job import Job

AdapterExport = Literal["merge", "peft", "base"]
_GENERATION_CONFIG = "generation_config.json"
Log = Callable[[str], None]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True)
class ExportSettings:
    """The form of the exported files."""

    dtype: str | None = None  # As stored if None
    shard_bytes: int = 5 * 10**9
    adapters: AdapterExport = "merge"


@dataclass(frozen=True)
class _ExportedModel:
    """The tensors of a model of transformers, or those of its adapters, and its config."""

    tensors: Sequence[ExportedTensor]
    parameters: StoredParameters
    write_config: Callable[[Path, Tokenizer | None], None]
    adapters: ExportedAdapters | None = None  # Set if these are exported alone

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def export_to_hf(job: Job, checkpoint: CheckpointReader, folder: Path, *, settings: ExportSettings, log: Log) -> int:
    """Write the model of a checkpoint to a new folder. Returns the bytes of its tensors."""
    model, adapters = job.model, job.model.adapters
    scale = adapters.alpha / adapters.rank if adapters and settings.adapters == "merge" else None
    parameters = StoredParameters(checkpoint, settings.dtype, scale)
    if isinstance(model, UserModuleSettings):
        exported = _module(model, parameters, settings)
    else:
        exported = _decoder(model, parameters, settings)
    with new_folder(folder) as unfinished:
        with log_if_slow(log, f"checking the tensors of {checkpoint.path} ..."):
            exported.parameters.verify(name for tensor in exported.tensors for name in tensor.sources)
        progress = progress_if_slow(log)
        check_free_space(unfinished.parent, exported.size_bytes, "make room, or export to another disk")
        tokenizer = _write_tokenizer(job, unfinished, log)
        if exported.adapters is not None:
            write_adapters(unfinished, adapters, exported.adapters, progress=progress)
        else:
            write_shards(unfinished, exported.tensors, settings.shard_bytes, progress=progress)
            exported.write_config(unfinished, tokenizer)
            _end_at_turns(unfinished / _GENERATION_CONFIG, tokenizer)
    return exported.size_bytes


def _module(model: UserModuleSettings, parameters: StoredParameters, settings: ExportSettings) -> _ExportedModel:
    check_input(
        model.hf_path is not None,
        f"model.factory = {model.factory!r} is code of yours, for which transformers has no class; read the tensors "
        "of its checkpoint with motet.open_checkpoint",
    )
    place = str(model.hf_path)
    checkpoint = open_hf_checkpoint(place, model.arguments)
    stored = module_without_memory(checkpoint, parameters)
    write_config = partial(_write_module_config, stored.module, place=Path(place).expanduser())
    if settings.adapters == "peft":
        base = None if checkpoint.weights_folder is None else place
        adapters = module_adapters(stored, checkpoint, base)
        return _ExportedModel(adapters.tensors, stored.parameters, write_config, adapters)
    tensors = exported_module(stored)
    dtype = next(tensor.dtype for tensor in tensors if "float" in tensor.dtype)
    stored.module.config.dtype = dtype
    return _ExportedModel(tensors, stored.parameters, write_config)


def _write_module_config(module: Any, folder: Path, _: Tokenizer | None, *, place: Path) -> None:
    with silence_transformers():
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(folder)
        if module.can_generate():
            source = place / _GENERATION_CONFIG
            if source.is_file():
                shutil.copy(source, folder / _GENERATION_CONFIG)
            else:
                module.generation_config.save_pretrained(folder)


def _decoder(model: ModelSettings, parameters: StoredParameters, settings: ExportSettings) -> _ExportedModel:
    if not isinstance(model, DecoderSettings):
        raise InputError(f"model.family = {model.family!r}: motet exports its decoders and hf: models alone")
    config, tensors = exported_decoder(model, parameters)
    config["dtype"] = next(tensor.dtype for tensor in tensors)
    write_config = partial(_write_decoder_config, config)
    if settings.adapters == "peft":
        adapters = decoder_adapters(model, parameters)
        return _ExportedModel(adapters.tensors, parameters, write_config, adapters)
    return _ExportedModel(tensors, parameters, write_config)


def _write_decoder_config(config: dict[str, Any], folder: Path, tokenizer: Tokenizer | None) -> None:
    # Without these keys transformers would take the tokens of Llama and others
    begin = tokenizer.begin_ids[0] if tokenizer and tokenizer.begin_ids else None
    end, pad = (tokenizer.end_id, tokenizer.pad_id) if tokenizer else (None, None)
    tokens = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "config.json", config | tokens)
    _write_json(folder / _GENERATION_CONFIG, {name: token for name, token in tokens.items() if token is not None})


def _write_tokenizer(job: Job, folder: Path, log: Log) -> Tokenizer | None:
    """The tokenizer of the run, with the files that are next to it, such as a chat template."""
    try:
        spec, tokenizer, _ = find_tokenizer(job.data)
    except InputError as error:
        log(f"the folder gets no tokenizer: {error}")
        return None
    place = Path(spec)
    place = place if place.is_dir() else place.parent
    if tokenizer.is_byte_level:
        tokenizer.save(folder)
    else:
        for name in (name for name in _TOKENIZER_FILES if (place / name).is_file()):
            shutil.copy(place / name, folder / name)
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        tokenizer.save(folder)
    values = parse_json(config.read_text(encoding="utf-8"))
    _write_json(config, {"tokenizer_class": "PreTrainedTokenizerFast"} | values)
    return tokenizer


def _end_at_turns(path: Path, tokenizer: Tokenizer | None) -> None:
    """Let `generate` end at the token with which the chat template ends a turn, as `motet generate --chat` does."""
    if tokenizer is None or not tokenizer.has_chat_template or tokenizer.folder is None or not path.is_file():
        return
    try:
        turn = tokenizer.chat.turn_end()
    except InputError:  # A template for which a user's message alone is no conversation
        return
    values = parse_json(path.read_text(encoding="utf-8"))
    ends = values.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else ends or [tokenizer.end_id]
    if turn is not None and turn not in ends:
        _write_json(path, values | {"eos_token_id": [*ends, turn]})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
