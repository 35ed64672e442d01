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
    for names in _tied_names(module):
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


def _tied_names(module: nn.Module) -> list[list[str]]:
    """All names of each tensor of the module's state."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    return list(names.values())


def _differing_ties(module: nn.Module, parameters: StoredParameters) -> list[list[str]]:
    """The names of tied tensors that have several values in the checkpoint."""
    tied = [names for names in _tied_names(module) if len(names) > 1]
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


@dataclass(frozen=True)
class _Box:
    """Elements of a tensor that are a box of another one, whose dimensions may be in another order."""

    offsets: list[int]
    lengths: list[int]
    order: list[int]  # For each dimension of the box that is longer than 1, that of the other tensor


def _find_box(target: Tensor, source: Tensor) -> _Box | None:
    """The elements of a contiguous tensor that a view shows; None if they are not a box."""
    offset, strides, offsets = target.storage_offset(), source.stride(), list[int]()
    for stride in strides:
        offsets.append(offset // stride)
        offset %= stride
    lengths, order = [1] * source.ndim, list[int]()
    for size, stride in zip(target.shape, target.stride(), strict=True):
        if size == 1:
            continue
        dims = [dim for dim in range(source.ndim) if strides[dim] == stride and source.shape[dim] > 1]
        if not dims or dims[0] in order or offsets[dims[0]] + size > source.shape[dims[0]]:
            return None
        lengths[dims[0]] = size
        order.append(dims[0])
    return _Box(offsets, lengths, order)


def _exported_view(name: str, target: Tensor, source: str | None, *, conversion: "_Conversion") -> ExportedTensor:
    parameters, shape = conversion.stored.parameters, tuple(target.shape)
    box = _find_box(target, conversion.state[source]) if source is not None else None
    if source is None or box is None:
        sources = conversion.sources_of(name)
        pieces = partial(conversion.pieces, name)
        return ExportedTensor(name, parameters.exported_dtype(sources[0]), shape, pieces, tuple(sources))
    pieces = partial(_pieces, source, box, parameters)
    return ExportedTensor(name, parameters.exported_dtype(source), shape, pieces, (source,))


def _pieces(source: str, box: _Box, parameters: StoredParameters) -> Iterator[Tensor]:
    if not box.offsets:
        yield parameters.cast(source, parameters.complete(source))
        return
    # Rows of the source are rows of the target, or all that the target needs of them are read together
    has_same_rows = box.order[:1] == [0] or box.lengths[0] == 1
    first, stop = box.offsets[0], box.offsets[0] + box.lengths[0]
    inner = tuple(slice(at, at + n) for at, n in zip(box.offsets[1:], box.lengths[1:], strict=True))
    unit = 1 if has_same_rows else stop - first
    others = [dim for dim in range(len(box.offsets)) if dim not in box.order]
    for rows in parameters.pieces(source, first, stop, unit=unit, inner=inner):
        yield parameters.cast(source, rows.permute(*others, *box.order))


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
