"""The parameters of a model in a checkpoint, read by rows, with adapters merged into the weights."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from motet.checkpoint.reader import CheckpointReader
from motet.checkpoint.verification import verify_tensors
from motet.core.errors import check_input
from motet.core.units import dtype_name
from motet.export.safetensors_shards import PIECE_BYTES

_KINDS = ("master", "frozen", "buffer")


@dataclass(frozen=True)
class StoredParameters:
    """Parameters and buffers by their names in the module."""

    tensors: CheckpointReader
    dtype: str | None = None  # The dtype of the exported parameters; unchanged if None
    # alpha / rank of the adapters that are merged, and the layers whose weight is [in, out]
    merged_scale: float | None = None
    transposed_layers: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # Another name of a tensor -> its name in the checkpoint

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor under this name."""
        return any(f"{kind}/{name}" in self.tensors for kind in _KINDS)

    def key(self, name: str) -> str:
        """The name in the checkpoint."""
        stored = self.aliases.get(name, name)
        keys = [key for kind in _KINDS if (key := f"{kind}/{stored}") in self.tensors]
        check_input(
            keys, f"{self.tensors.path} has no {name}, which the model of its job has; give the checkpoint of the job"
        )
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

    def rows(self, name: str, rows: slice, inner: tuple[slice, ...] = ()) -> Tensor:
        """Rows of a tensor, and of these the elements in `inner`; merged ones in float64."""
        if not self.has_merged_adapter(name):
            return self.tensors[self.key(name), rows, *inner]
        a, b = map(self.key, self._adapter_of(name))
        if name.rpartition(".")[0] in self.transposed_layers:
            product = (self.tensors[b].double() @ self.tensors[a, :, rows].double()).T
        else:
            product = self.tensors[b, rows].double() @ self.tensors[a].double()
        merged = self.tensors[self.key(name), rows].double() + (self.merged_scale or 0.0) * product
        return merged[:, *inner]

    def complete(self, name: str) -> Tensor:
        """A complete tensor; a merged one in float64."""
        shape = self.shape(name)
        return self.rows(name, slice(shape[0])) if shape else self.tensors[self.key(name)]

    def verify(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint in which one of these tensors has changed."""
        read = {name for each in names for name in (each, *self._adapter_of(each))}
        verify_tensors(self.tensors.path, self.tensors.index, sorted({self.key(name) for name in read}))

    def _adapter_of(self, name: str) -> list[str]:
        """The matrices that are merged into a weight."""
        layer = name.rpartition(".")[0]
        return [f"{layer}.adapter_a", f"{layer}.adapter_b"] if self.has_merged_adapter(name) else []

    def pieces(
        self, name: str, first: int, stop: int, *, unit: int = 1, inner: tuple[slice, ...] = ()
    ) -> Iterator[Tensor]:
        """Rows in pieces of whole units, in float64 where adapters are merged."""
        columns = prod(part.stop - part.start for part in inner) if inner else prod(self.shape(name)[1:])
        row_bytes = max(1, columns) * 8
        step = max(1, PIECE_BYTES // (row_bytes * unit)) * unit
        for start in range(first, stop, step):
            yield self.rows(name, slice(start, min(start + step, stop)), inner)

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
