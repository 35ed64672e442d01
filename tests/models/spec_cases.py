"""Small models of each family, their batches, and the bytes that autograd keeps of a forward."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from small_models import built

from live_storages import kept_bytes_after
from motet.core.batch import Batch
from motet.models.compilation.compiled_blocks import compile_blocks
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.context_partition import ContextSplit
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.train.balance.balanced_layers import find_balanced_layers
from motet.train.balance.expert_balance import ExpertBalance
from motet.train.job import job_from_tree

SMALL = {"vocab_size": 50, "context": 64, "layers": 2, "hidden": 24, "heads": 6, "ffn_hidden": 17}
CASES: dict[type[TransformerSettings], list[dict[str, Any]]] = {}
CASES[DecoderSettings] = [
    {},
    {"kv_heads": 2, "tied": False},
    {"kv_heads": 1, "head_dim": 8, "rotary_fraction": 0.5},
    {"gated": False, "activation": "gelu", "norm": "layer", "positions": "learned", "bias": True},
    {"gated": False, "activation": "relu", "positions": "none"},
    {"gated": False, "activation": "relu_squared", "query_key_norm": True},
    {"query_key_norm": True, "positions": "none", "sliding_window": 4, "kv_heads": 3},
    {"sliding_window": 11},
]
_MIXTURE = {"count": 6, "per_token": 2, "hidden": 5}
_LATENT = {"key_value_rank": 7, "rotary_head_dim": 2, "plain_head_dim": 5, "value_head_dim": 7}
MIXTURES: list[dict[str, Any]] = [
    {"experts": {**_MIXTURE, "shared": 2}, "kv_heads": 2},
    {"experts": {**_MIXTURE, "scores": "sigmoid", "weight_scale": 2.0, "capacity": 0.8, "drop": "lowest"}},
    {"experts": {**_MIXTURE, "normalize_weights": False, "first_dense_layers": 1, "shared": 1}, "gated": False},
    {"experts": {**_MIXTURE, "shared": 1}, "gated": False, "activation": "relu", "balance": {"kind": "bias"}},
    {"experts": {**_MIXTURE, "groups": 3, "groups_per_token": 2, "capacity": 1.1, "drop": "last"}},
    {"experts": {**_MIXTURE, "shared": 1}, "balance": {"kind": "row"}},
    {"experts": {**_MIXTURE, "scores": "sigmoid"}, "balance": {"kind": "row", "z_weight": 0.1}},
]
LATENT: list[dict[str, Any]] = [
    {"latent_attention": _LATENT},
    {"latent_attention": {**_LATENT, "query_rank": 11}, "experts": _MIXTURE},
]
CASES[DecoderSettings] += [*MIXTURES, *LATENT]
CASES[EncoderSettings] = [{}, {"activation": "relu", "token_types": 0}, {"head": "classify", "classes": 3}]
CASES[EncoderSettings] += [{"gated": True, "norm": "rms", "activation": "relu_squared"}]
CASES[EncoderDecoderSettings] = [{}, {"gated": False, "activation": "relu_squared", "norm": "layer"}]
CASES[EncoderDecoderSettings] += [{"gated": False, "activation": "relu", "tied": False, "decoder_layers": 1}]


def batch_of(model: TransformerSettings, shape: MicroBatchShape) -> Batch:
    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, model.vocab_size, (shape.rows, length))

    def documents(length: int) -> torch.Tensor:
        return (torch.arange(length) // 4).repeat(shape.rows, 1)

    by_row = isinstance(model, EncoderSettings) and model.head == "classify"
    both = isinstance(model, EncoderDecoderSettings)
    weights = torch.ones(shape.rows, shape.length)
    weights.view(-1)[shape.count("target") :] = 0.0
    return Batch(
        tokens=tokens(shape.length),
        targets=torch.zeros(shape.rows, dtype=torch.int64) if by_row else tokens(shape.length),
        weights=torch.ones(shape.rows) if by_row else weights,
        rows=torch.arange(shape.rows),
        positions=(torch.arange(shape.length) % 4).repeat(shape.rows, 1) if shape.packed and not both else None,
        documents=documents(shape.length) if shape.packed else None,
        source=tokens(shape.source_length) if both else None,
        source_documents=documents(shape.source_length) if shape.packed and both else None,
    )


def forward(model: TransformerSettings, shape: MicroBatchShape, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    trainee, batch = built(model, 0, dtype), batch_of(model, shape)

    if isinstance(model, DecoderSettings) and model.balance.row_weight + model.balance.z_weight:
        tree = {"name": "small", "run": {"steps": 1}, "data": {"sequence_length": shape.length}}
        job = job_from_tree({**tree, "model": model.model_dump(mode="json", exclude_unset=True)}, "small")
        layers, group = find_balanced_layers(job, trainee.module), RankGroup(0, 1, None, torch.device("cpu"))
        split = {"dims": ParallelDims(()), "context": ContextSplit()}
        balance = ExpertBalance(trainee.module, layers, model.balance, group=group, **split)
        balanced: Any = partial(balance.rows, balance.rows_of(batch, 1.0))
    else:
        balanced = nullcontext

    def loss() -> torch.Tensor:
        with trainee.randomness(0, batch.rows), balanced():
            return trainee.loss_sum(batch)

    return trainee.module, loss


def kept_bytes(
    model: TransformerSettings, shape: MicroBatchShape, dtype: torch.dtype, *, compiles: bool = False
) -> int:
    """Bytes that autograd keeps of a forward, with eager or compiled blocks."""
    module, loss = forward(model, shape, dtype)
    if compiles:
        compile_blocks(module, falls_back=False)
    return kept_bytes_after(module, loss)
