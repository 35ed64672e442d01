"""The tensors of motet's decoder as those of Llama, Qwen 2, Qwen 3, Mistral or GPT-2."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from motet.export.safetensors_shards import ExportedTensor
from motet.export.stored_parameters import StoredParameters
from motet.models.hf.decoder_config import config_of_settings
from motet.models.hf.decoder_tensors import DecoderTensors, FolderPart, is_adapter, map_decoder_tensors
from motet.models.hf.decoder_weights import to_folder
from motet.models.settings import DecoderSettings


def exported_decoder(
    settings: DecoderSettings, parameters: StoredParameters
) -> tuple[dict[str, Any], list[ExportedTensor]]:
    """The config and the tensors of a decoder; adapters are merged or left out."""
    config, mapped = config_and_tensors(settings)
    parts = [(name, part) for name, part in mapped.in_folder() if not is_adapter(name)]
    return config, [exported_part(name, part, parameters) for name, part in parts]


def exported_part(name: str, part: FolderPart, parameters: StoredParameters, *, prefix: str = "") -> ExportedTensor:
    """A tensor of a folder, which is some rows of a tensor of motet."""

    def pieces() -> Iterator[Tensor]:
        first, stop = part.first_row, part.first_row + part.rows
        unit = part.rows if part.is_transposed else part.head_dim or 1
        for rows in parameters.pieces(name, first, stop, unit=unit):
            yield to_folder(part, parameters.cast(name, rows))

    return ExportedTensor(prefix + part.name, parameters.exported_dtype(name), part.shape, pieces, (name,))


def config_and_tensors(settings: DecoderSettings) -> tuple[dict[str, Any], DecoderTensors]:
    """The config of a decoder, and its tensors in motet and in a folder with this config."""
    config = config_of_settings(settings)
    return config, map_decoder_tensors(settings, config["model_type"])
