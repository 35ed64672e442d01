"""Initial values of adapters: drawn from the seed, or read by boxes from a folder of PEFT."""

from typing import Protocol

import torch
from torch import Tensor

from motet.core.errors import check_input
from motet.models.hf.decoder_weights import read_part
from motet.models.hf.hf_weights import read_box
from motet.models.hf.peft_files import DecoderAdapters, PeftFolder, find_decoder_adapters, read_peft_folder
from motet.models.hf.safetensors_files import fingerprint_of
from motet.models.parameter_values import BoxReader, ParameterValues, Shape, draw_values
from motet.models.settings import DecoderSettings, TrainableParameterSettings
from motet.models.weight_init import TensorBox, adapter_init_rule


class AdapterSource(Protocol):
    """The initial values of the matrices of all adapters."""

    fingerprint: str

    def open(self, name: str, shape: Shape) -> BoxReader:
        """A function that reads boxes of a matrix."""
        ...

    def check_layers(self, layers: list[str]) -> None:
        """Refuse a model in which these layers have adapters."""
        ...


def adapter_source(model: TrainableParameterSettings, seed: int) -> AdapterSource:
    """The values of the adapters of a model."""
    if model.adapters is None or model.adapters.weights is None:
        return DrawnAdapters(seed)
    if isinstance(model, DecoderSettings):
        return _DecoderAdapters(find_decoder_adapters(model), seed)
    return _ModuleAdapters(read_peft_folder(model.adapters))


class DrawnAdapters:
    """A is drawn, and B is zero."""

    fingerprint = ""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def open(self, name: str, shape: Shape) -> BoxReader:
        rule = adapter_init_rule(name, shape)
        assert rule is not None, name
        return lambda box: draw_values(self._seed, name, shape, rule=rule, box=box)

    def check_layers(self, layers: list[str]) -> None:
        pass


class _ModuleAdapters:
    """Matrices of the same layers in a folder."""

    def __init__(self, folder: PeftFolder) -> None:
        self._folder = folder
        self.fingerprint = fingerprint_of(weight for pair in folder.layers.values() for weight in (pair.a, pair.b))

    def open(self, name: str, shape: Shape) -> BoxReader:
        layer, _, kind = name.rpartition(".")
        pair = self._folder.layers[layer]
        weight = pair.a if kind == "adapter_a" else pair.b
        problem = f"{self._folder.place}: {name} has the shape {list(weight.shape)} and must have {list(shape)}"
        check_input(weight.shape == shape, f"{problem}; give the adapters of this model")
        return lambda box: _at_least_float32(read_box(weight, box))

    def check_layers(self, layers: list[str]) -> None:
        self._folder.check_layers(layers)


class _DecoderAdapters:
    """Matrices of motet's joined layers. Ranks that no layer of the folder needs are drawn in A, and zero in B."""

    def __init__(self, adapters: DecoderAdapters, seed: int) -> None:
        self._adapters, self._drawn = adapters, DrawnAdapters(seed)
        self.fingerprint = fingerprint_of(each.weight for parts in adapters.parts.values() for each in parts)

    def open(self, name: str, shape: Shape) -> BoxReader:
        drawn, parts, rank = self._drawn.open(name, shape), self._adapters.parts[name], self._adapters.folder.rank
        is_first = name.endswith(".adapter_a")

        def read(box: TensorBox) -> Tensor:
            values = drawn(box)
            for each in parts:
                rows = (each.first_rank, rank) if is_first else (each.part.first_row, each.part.rows)
                columns = (0, shape[1]) if is_first else (each.first_rank, rank)
                inside = [
                    _overlap(span, other) for span, other in zip(zip(*box, strict=True), (rows, columns), strict=True)
                ]
                if all(n > 0 for _, n in inside):
                    (row, row_count), (column, column_count) = inside
                    inner = (row - rows[0], column - columns[0]), (row_count, column_count)
                    row, column = row - box[0][0], column - box[0][1]
                    part = read_box(each.weight, inner) if is_first else read_part(each.part, each.weight, inner)
                    values = values.to(torch.promote_types(values.dtype, part.dtype))
                    values[row : row + row_count, column : column + column_count] = part
            return values

        return read

    def check_layers(self, layers: list[str]) -> None:
        pass  # The names of layers follow from the settings, and were compared before


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The start and the length of the part that two spans share."""
    start = max(a[0], b[0])
    return start, min(sum(a), sum(b)) - start


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


class AdapterValues:
    """Values of a module with adapters, from those of the module without them."""

    def __init__(self, others: ParameterValues, adapters: AdapterSource, shapes: dict[str, Shape]) -> None:
        self._others, self._adapters, self._shapes = others, adapters, shapes
        self.fingerprint = " ".join(filter(None, (others.fingerprint, adapters.fingerprint)))

    def open(self, name: str) -> BoxReader:
        shape = self._shapes[name]
        is_other = adapter_init_rule(name, shape) is None
        return self._others.open(name) if is_other else self._adapters.open(name, shape)
