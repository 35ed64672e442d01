"""Products that one device adds up in parts, as ranks that split a layer do, with the parts drawn at random."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, ModelSharding
from motet.parallel.tensor_parallel.sharded_module import computes_linear
from motet.parity.record.engine_hooks import patched_method


class _SplitLayer(NamedTuple):
    layer: Any
    is_row_layer: bool  # Ranks split its inputs, otherwise its outputs
    is_transposed: bool  # The weight is [in, out]


@contextmanager
def reordered_products(module: nn.Module, sharding: ModelSharding, ranks: int, *, seed: int) -> Iterator[None]:
    """Let each linear layer that `ranks` ranks split add up as many products, of randomly chosen features."""
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for split in _split_layers(module, sharding):
            features = split.layer.weight.shape[split.is_row_layer != split.is_transposed]
            parts = torch.randperm(features, generator=generator).chunk(ranks)
            stack.enter_context(patched_method(split.layer, "forward", partial(_multiply, split, parts)))
        yield


def _multiply(split: _SplitLayer, parts: tuple[Tensor, ...], x: Tensor) -> Tensor:
    weight, bias = split.layer.weight, split.layer.bias
    weight = weight.T if split.is_transposed else weight
    if split.is_row_layer:
        products = [F.linear(x[..., part], weight[:, part], None if n else bias) for n, part in enumerate(parts)]
        return sum(products[1:], products[0])
    outputs = [F.linear(x, weight[part], None if bias is None else bias[part]) for part in parts]
    return torch.cat(outputs, -1)[..., torch.cat(parts).argsort()]


def _split_layers(module: nn.Module, sharding: ModelSharding) -> Iterator[_SplitLayer]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    for comm in sharding.boundary_comms:
        is_row_layer = comm.side == "output"
        if comm.over == TENSOR_DIMENSION and comm.operation in ("copy", "gather", "sum", "scatter"):
            for layer in map(module.get_submodule, (comm.module, *comm.shared_by)):
                weight = dict(layer.named_parameters(recurse=False)).get("weight")
                splits = sharding.rule(names[weight]).splits if weight is not None else ()
                is_transposed = any((split.dim == 0) == is_row_layer for split in splits)
                if splits and computes_linear(layer, is_transposed):
                    yield _SplitLayer(layer, is_row_layer, is_transposed)
