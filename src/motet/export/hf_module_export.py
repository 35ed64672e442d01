"""The tensors of a model of transformers under the names that `save_pretrained` writes.

The module is built without memory. transformers itself then chooses among tied weights, and converts names and tensors
back to those of its files. A tensor of a file that is a view of one of the module is read from the checkpoint by rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.export.safetensors_shards import ExportedTensor
from motet.export.stored_parameters import StoredParameters
from motet.export.tensor_views import find_box, read_view
from motet.models.adapters import is_conv1d
from motet.models.hf.hf_model import HuggingFaceCheckpoint, build_hf_model, silence_transformers


@dataclass(frozen=True)
class StoredModule:
    """A module of transformers without memory, and its parameters in a checkpoint."""

    module: Any
    parameters: StoredParameters


def module_without_memory(checkpoint: HuggingFaceCheckpoint, parameters: StoredParameters) -> StoredModule:
    """The module of a job. A weight that is tied to others and gets values unlike theirs is tied no longer."""
    module = _build_on_meta(checkpoint)
    layers = frozenset(name for name, layer in module.named_modules() if is_conv1d(layer))
    aliases = dict[str, str]()
    for names in tied_names(module):
        present = [name for name in names if parameters.has(name)]
        aliases |= {name: present[0] for name in names if present and name not in present}
    parameters = replace(parameters, aliases=aliases, transposed_layers=layers)
    if _differing_ties(module, parameters):
        checkpoint.config.tie_word_embeddings = False
        module = _build_on_meta(checkpoint)
    for names in _differing_ties(module, parameters):
        raise InputError(
            f"{' and '.join(names)} are one tensor in a {type(module).__name__}, and differ in "
            f"{parameters.tensors.path} with merged adapters; export the adapters alone with --adapters peft"
        )
    return StoredModule(module, parameters)


def _build_on_meta(checkpoint: HuggingFaceCheckpoint) -> Any:
    with torch.device("meta"):
        return build_hf_model(checkpoint, load_weights=False)


def tied_names(module: nn.Module) -> list[list[str]]:
    """All names of each tensor of the module's state."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    return list(names.values())


def _differing_ties(module: nn.Module, parameters: StoredParameters) -> list[list[str]]:
    """The names of tied tensors that have several values in the checkpoint."""
    tied = [names for names in tied_names(module) if len(names) > 1]
    is_merged = parameters.has_merged_adapter
    return [names for names in tied if any(map(is_merged, names)) or len([*filter(parameters.has, names)]) > 1]


def exported_module(stored: StoredModule) -> list[ExportedTensor]:
    """The tensors that `save_pretrained` would write, in its order."""
    module, state = stored.module, dict(stored.module.state_dict())
    for name in module._keys_to_ignore_on_save or ():
        state.pop(name, None)
    try:
        saving = import_module("transformers.modeling_utils")
        loading = import_module("transformers.core_model_loading")
        with silence_transformers():
            state = saving.remove_tied_weights_from_state_dict(state, module)
            with _contiguous_as_views():
                targets: dict[str, Tensor] = loading.revert_weight_conversion(module, dict(state))
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"this version of transformers does not say how it saves a {type(module).__name__} "
            f"({type(error).__name__}: {error}); install another one"
        ) from None
    sources = {id(tensor.untyped_storage()): name for name, tensor in state.items()}
    conversion = _Conversion(stored, state)
    return [
        _exported_view(name, target, sources.get(id(target.untyped_storage())), conversion=conversion)
        for name, target in targets.items()
    ]


@contextmanager
def _contiguous_as_views() -> Iterator[None]:
    """Let chunks of tensors stay views, which show the elements that they hold."""
    with patch.object(Tensor, "contiguous", lambda tensor, **_: tensor):
        yield


def _exported_view(name: str, target: Tensor, source: str | None, *, conversion: "_Conversion") -> ExportedTensor:
    parameters, shape = conversion.stored.parameters, tuple(target.shape)
    box = find_box(target, conversion.state[source]) if source is not None else None
    if source is None or box is None:
        sources = conversion.sources_of(name)
        pieces = partial(conversion.pieces, name)
        return ExportedTensor(name, parameters.exported_dtype(sources[0]), shape, pieces, tuple(sources))
    pieces = partial(read_view, parameters, source, box)
    return ExportedTensor(name, parameters.exported_dtype(source), shape, pieces, (source,))


@dataclass(frozen=True)
class _Conversion:
    """Tensors that transformers makes of several ones of the module, which are read and converted together."""

    stored: StoredModule
    state: Mapping[str, Tensor]

    def sources_of(self, name: str) -> list[str]:
        """The tensors of the module that a tensor of a file is made of."""
        return self._groups[name]

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The tensor, which is converted with the others of its group."""
        parameters, sources = self.stored.parameters, self._groups[name]
        values = {each: parameters.cast(each, parameters.complete(each)) for each in sources}
        yield _revert(self.stored.module, values)[name]

    @cached_property
    def _groups(self) -> dict[str, list[str]]:
        """The tensors of the module that transformers converts together, by each tensor that it makes of them."""
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
        transforms = [each.reverse_transform() for each in mapping(self.stored.module, add_legacy=False)[::-1]]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        by_target = dict[str, list[str]]()
        for name in self.state:
            target, pattern = loading.rename_source_key(name, [], converters, None, None)
            by_target.setdefault(target if pattern is not None else name, []).append(name)
        groups = dict[str, list[str]]()
        for sources in by_target.values():
            targets = _revert(self.stored.module, {name: self.state[name] for name in sources})
            groups |= dict.fromkeys(targets, sources)
        return groups


def _revert(module: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    loading = import_module("transformers.core_model_loading")
    converted: dict[str, Tensor] = loading.revert_weight_conversion(module, state)
    return converted
