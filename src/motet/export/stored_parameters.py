"""The parameters of a model in a checkpoint, read by rows, with adapters merged into the weights."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from motet.core.errors import check_input
from motet.core.units import dtype_name
from motet.export.safetensors_shards import PIECE_BYTES

_KINDS = ("master", "frozen", "buffer")


class CheckpointTensors(Protocol):
    """The tensors of a checkpoint by name, of which rows can be read."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def __getitem__(self, key: str | tuple[str | slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class StoredParameters:
    """Parameters and buffers by their names in the module."""

    tensors: CheckpointTensors
    folder: str  # The checkpoint, for messages
    dtype: str | None = None  # The dtype of the exported parameters; as they are stored if None
    # alpha / rank of the adapters that are merged, and the layers whose weight is [in, out]
    merged_scale: float | None = None
    transposed_layers: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # Another name of a tensor -> its name in the checkpoint

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor under this name."""
        return any(f"{kind}/{name}" in self.tensors.names for kind in _KINDS)

    def key(self, name: str) -> str:
        """The name in the checkpoint."""
        stored = self.aliases.get(name, name)
        keys = [key for kind in _KINDS if (key := f"{kind}/{stored}") in self.tensors.names]
        check_input(keys, f"{self.folder} has no {name}, which the model of its job has; give the checkpoint of the job")
        return keys[0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors.shape(self.key(name)))

    def exported_dtype(self, name: str) -> str:
        """The dtype that a tensor gets; buffers keep theirs."""
        stored = self.tensors.dtype(key := self.key(name))
        is_cast = self.dtype is not None and stored.is_floating_point and not key.startswith("buffer/")
        return self.dtype if is_cast and self.dtype else dtype_name(stored)

    def has_merged_adapter(self, name: str) -> bool:
        """Whether the adapter of a layer is added to this weight."""
        layer, _, kind = name.rpartition(".")
        return self.merged_scale is not None and kind == "weight" and self.has(f"{layer}.adapter_a")

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Rows of a tensor; merged ones in float64."""
        rows = self.tensors[self.key(name), first:stop]
        if not self.has_merged_adapter(name):
            return rows
        layer = name.rpartition(".")[0]
        a, b = f"{layer}.adapter_a", f"{layer}.adapter_b"
        if layer in self.transposed_layers:
            product = (self.complete(b).double() @ self.complete(a)[:, first:stop].double()).T
        else:
            product = self.tensors[self.key(b), first:stop].double() @ self.complete(a).double()
        return rows.double() + (self.merged_scale or 0.0) * product

    def complete(self, name: str) -> Tensor:
        """A complete tensor; a merged one in float64."""
        shape = self.shape(name)
        return self.rows(name, 0, shape[0]) if shape else self.tensors[self.key(name)]

    def pieces(self, name: str, first: int, stop: int, *, unit: int = 1) -> Iterator[Tensor]:
        """Rows in pieces of whole units, in float64 where adapters are merged."""
        row_bytes = max(1, prod(self.shape(name)[1:])) * 8
        step = max(1, PIECE_BYTES // (row_bytes * unit)) * unit
        for start in range(first, stop, step):
            yield self.rows(name, start, min(start + step, stop))

    def cast(self, name: str, values: Tensor) -> Tensor:
        """Values in the exported dtype, which must hold them."""
        dtype = getattr(torch, self.exported_dtype(name))
        cast = values.to(dtype)
        if dtype == torch.float16 and not cast.isfinite().all():
            largest = values.abs().max().item()
            check_input(
                largest == float("inf") or largest != largest,
                f"{name} holds {largest:g}, and fp16 nothing above 65504; export with --dtype bf16 or fp32",
            )
        return cast
