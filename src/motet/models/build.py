"""A trainable model from settings: a module with its initial values, its loss and its logits."""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.core.seeds import derive_seed
from motet.models.adapters import apply_adapters_and_freezing
from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.encoder import BidirectionalEncoder
from motet.models.arch.encoder_decoder import EncoderDecoderModel
from motet.models.arch.key_value_cache import KeyValueCache
from motet.models.arch.logit_slices import padded_targets
from motet.models.arch.loss import cross_entropy, linear_cross_entropy, vocabulary_shard_of
from motet.models.hf import hf_model
from motet.models.hf.decoder_files import find_decoder_tensors
from motet.models.hf.decoder_weights import DecoderFolderValues
from motet.models.hf.hf_weights import find_weights
from motet.models.hf.peft_weights import AdapterSource, AdapterValues, adapter_source
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, has_dropout
from motet.models.parameter_values import (
    DrawnValues,
    ParameterValues,
    Shape,
    no_initial_values,
    parameter_shapes,
    parameters_on_meta,
    whole_box,
)
from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    ModelSettings,
    TransformerSettings,
    UserModuleSettings,
    check_can_be_trained,
)
from motet.models.user_module import (
    DataRequirements,
    build_user_module,
    check_num_logits,
    check_prediction_shape,
    make_logits_function,
    with_loss_checks,
)

Randomness = Callable[[int, Tensor], AbstractContextManager[object]]
_ARCHITECTURES: dict[type[TransformerSettings], Callable[[Any], nn.Module]] = {
    DecoderSettings: CausalDecoder,
    EncoderSettings: BidirectionalEncoder,
    EncoderDecoderSettings: EncoderDecoderModel,
}


@dataclass(frozen=True)
class TrainableModel:
    """A model that is ready to be trained."""

    module: nn.Module  # Single-device code
    loss_sum: Callable[[Batch], Tensor]  # Weighted sum of a micro-batch's losses: a scalar, in float32 at least
    # [R, T, V], or [R, classes]; of the entries of this rank if `vocabulary_shard_of(module)` is set
    logits: Callable[[Batch], Tensor]
    vocab_size: int | None  # Entries of the input's vocabulary; None if unknown
    num_classes: int | None  # Vocabulary or classes that a target is from; None if unknown
    randomness: Randomness  # `with randomness(step, rows): ...` around a forward makes dropout layout-invariant
    context: int | None = None  # The longest sequence; None if unknown
    has_own_loss: bool = False  # The module defines its loss, so its outputs may be anything
    is_autoregressive: bool = False  # Its logits predict each next token
    # [R, V], the logits after the last of some tokens [R, T] that follow those of a cache; None without such a cache
    next_logits: Callable[[Tensor, KeyValueCache], Tensor] | None = None
    objective: str | None = None  # The objective of a Hugging Face model
    # The values of parameters on the meta device, or None if another rank's module has them.
    initial_values: ParameterValues | None = None
    remark: str | None = None  # Why a rank has to build the complete module, for the user
    # Runs the module on few tokens, once it has values, before its first batch; ranks that share a module call it
    # together. It finds out how the module takes batches, and refuses a module that cannot take them.
    check_on_tokens: Callable[[], int] | None = None
    use_check: Callable[[int], None] = lambda way: None  # Takes the result of the check on another rank


def build_module(
    settings: ModelSettings,
    checkpoint: hf_model.HuggingFaceCheckpoint | None = None,
    *,
    on_meta: bool = False,
) -> nn.Module:
    """The module with arbitrary values, on torch's current default device and dtype. With `on_meta`, a user's
    parameters may be without memory, and weights are not loaded."""
    check_can_be_trained(settings)
    if checkpoint := checkpoint or _open_hf_checkpoint(settings):
        return hf_model.build_hf_model(checkpoint, load_weights=not on_meta)
    if isinstance(settings, UserModuleSettings):
        return build_user_module(settings.factory, settings.arguments, on_meta=on_meta)
    return _ARCHITECTURES[type(settings)](settings)


def build_trainable_model(
    settings: ModelSettings,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    needs: DataRequirements | None = None,
    *,
    on_meta: bool = False,
) -> TrainableModel:
    """The module in train mode with initial values from the seed, adapters and frozen parameters.
    A user's module is checked against `needs` when it is first called. With `on_meta`, parameters have no memory, and
    a rank reads its shards from `initial_values`."""
    if isinstance(settings, UserModuleSettings):
        return _build_user_model(settings, seed, dtype, device=device, needs=needs, on_meta=on_meta)
    with torch.device("meta"), no_initial_values():
        module = build_module(settings)
    adapters = adapter_source(settings, seed)
    _finish_module(module, settings, adapters, dtype=dtype)
    shapes = parameter_shapes(module)
    values = AdapterValues(_own_values(settings, seed, shapes), adapters, shapes)
    if not on_meta:
        module.to_empty(device=device)
        for name, parameter in module.named_parameters():
            parameter.data.copy_(values.open(name)(whole_box(shapes[name])))
    _zero_buffers(module, device)
    return TrainableModel(
        module=module,
        loss_sum=_transformer_loss(module, settings),
        logits=lambda batch: module(**_transformer_inputs(batch, settings)),
        vocab_size=settings.vocab_size,
        num_classes=_num_row_classes(settings) or settings.vocab_size,
        randomness=_randomness(seed, module) if settings.dropout > 0 else _no_randomness,
        context=settings.context,
        is_autoregressive=isinstance(settings, DecoderSettings),
        next_logits=module.next_logits if isinstance(module, CausalDecoder) else None,
        initial_values=values if on_meta else None,
    )


def _zero_buffers(module: nn.Module, device: torch.device) -> None:
    """Give memory to the buffers of a module of motet; all of them are 0 at first."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, torch.zeros_like(buffer, device=device))


def _own_values(settings: TransformerSettings, seed: int, shapes: Mapping[str, Shape]) -> ParameterValues:
    """The initial values of a model of motet: from the folder of `model.weights`, or drawn."""
    if isinstance(settings, DecoderSettings) and settings.weights is not None:
        return DecoderFolderValues(find_decoder_tensors(settings))
    return DrawnValues(settings, seed, shapes)


def _build_user_model(
    settings: UserModuleSettings,
    seed: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    needs: DataRequirements | None,
    on_meta: bool,
) -> TrainableModel:
    checkpoint, module_seed = _open_hf_checkpoint(settings), derive_seed(seed, "module")
    with torch.random.fork_rng(devices=[]), parameters_on_meta() if on_meta else nullcontext():
        torch.manual_seed(module_seed)
        random.seed(module_seed)
        np.random.seed(module_seed % 2**32)
        module = build_module(settings, checkpoint, on_meta=on_meta)
    folder = checkpoint.weights_folder if checkpoint and on_meta else None
    weights, remark = find_weights(module, folder) if folder else (None, None)
    adapters = adapter_source(settings, seed)
    _finish_module(module, settings, adapters, dtype=dtype)
    if checkpoint is not None:
        _let_masks_follow(module)
    if not on_meta:
        module.to(device)
    for buffer in module.buffers():
        buffer.data = buffer.data if buffer.is_meta else buffer.data.to(device)
    model = _wrap_user_module(module, settings, checkpoint, seed=seed, needs=needs)
    if model.check_on_tokens and not on_meta:
        model.check_on_tokens()
    values = AdapterValues(weights, adapters, parameter_shapes(module)) if weights else None
    reads = f"rank 0 loads all weights of {folder} before ranks keep their parts: {remark}" if remark else None
    return replace(model, initial_values=values, remark=reads)


def _finish_module(module: nn.Module, settings: ModelSettings, adapters: AdapterSource, *, dtype: torch.dtype) -> None:
    apply_adapters_and_freezing(module, settings, adapters)
    _cast_parameters(module, dtype)
    module.train()


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast only parameters, since a buffer may need more bits; float64 casts all but complex buffers."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        module.double()
    for buffer in module.buffers():
        buffer.data = buffer.data.contiguous()  # an expanded buffer could be neither sent nor loaded


def _let_masks_follow(module: nn.Module) -> None:
    """Cast masks of zeros and ones, which GPT-1 keeps in float32 and multiplies with scores, to the weights' dtype."""
    for owner in module.modules():
        for name, mask in owner.named_buffers(recurse=False):
            is_mask = mask.ndim > 1 and mask.dtype == torch.float32 and not mask.is_meta
            if is_mask and bool(((mask == 0) | (mask == 1)).all()):
                owner.register_forward_pre_hook(partial(_cast_mask, name))


def _cast_mask(name: str, owner: nn.Module, _: object) -> None:
    mask, dtype = owner.get_buffer(name), next((p.dtype for p in owner.parameters()), None)
    if dtype is not None and mask.dtype != dtype:
        mask.data = mask.data.to(dtype)


def _wrap_user_module(
    module: nn.Module,
    settings: UserModuleSettings,
    checkpoint: hf_model.HuggingFaceCheckpoint | None,
    *,
    seed: int,
    needs: DataRequirements | None,
) -> TrainableModel:
    loss_sum, randomness = getattr(module, "loss_sum", None), _randomness(seed, module)
    logits, check_on_tokens, use_check = (
        hf_model.make_logits_function(module, checkpoint)
        if checkpoint
        else (make_logits_function(module), None, lambda way: None)
    )
    model = TrainableModel(
        module=module,
        loss_sum=with_loss_checks(module, loss_sum or _loss_from_logits(logits, module, needs), needs),
        logits=logits,
        vocab_size=settings.vocab_size,
        num_classes=settings.vocab_size,
        randomness=randomness,  # a user's module may drop anything
        has_own_loss=loss_sum is not None,
    )
    if checkpoint is None:
        return model
    vocab_size = getattr(checkpoint.config, "vocab_size", None)
    check_input(
        settings.vocab_size in (None, vocab_size),
        f"model.vocab_size = {settings.vocab_size}, but the config of {settings.factory} has {vocab_size}; "
        "leave it out, or set model.arguments.vocab_size",
    )
    return replace(
        model,
        vocab_size=vocab_size,
        num_classes=checkpoint.config.num_labels if checkpoint.kind == "classify" else vocab_size,
        randomness=randomness if has_dropout(module, checkpoint.config.to_dict()) else _no_randomness,
        context=hf_model.max_context(checkpoint),
        is_autoregressive=checkpoint.kind == "causal",
        objective="spans" if checkpoint.kind == "encoder-decoder" else checkpoint.kind,
        check_on_tokens=check_on_tokens,
        use_check=use_check,
    )


def _open_hf_checkpoint(settings: ModelSettings) -> hf_model.HuggingFaceCheckpoint | None:
    if isinstance(settings, UserModuleSettings) and settings.hf_path is not None:
        return hf_model.open_hf_checkpoint(settings.hf_path, settings.arguments)
    return None


def _randomness(seed: int, module: nn.Module) -> Randomness:
    return LayoutInvariantDropoutMode(derive_seed(seed, "dropout"), module).for_rows


def _no_randomness(step: int, rows: Tensor) -> AbstractContextManager[object]:
    return nullcontext()


def _transformer_inputs(batch: Batch, settings: TransformerSettings) -> dict[str, Any]:
    names = ["tokens", "positions", "documents", "places", "document_count"]
    if isinstance(settings, EncoderDecoderSettings):
        if batch.source is None:
            raise InputError("an encoder-decoder reads a source besides its tokens; set data.objective = 'spans'")
        names = ["tokens", "source", "documents", "source_documents", "places"]
    return {name: getattr(batch, name) for name in names}


def _transformer_loss(module: Any, settings: TransformerSettings) -> Callable[[Batch], Tensor]:
    """The loss from features, so that all logits never exist together; classes of rows have few logits."""
    if _num_row_classes(settings):
        return _loss_from_logits(lambda batch: module(**_transformer_inputs(batch, settings)), module)

    def loss_sum(batch: Batch) -> Tensor:
        features = module.features(**_transformer_inputs(batch, settings))
        check_prediction_shape(features.shape[:-1], batch, module)
        hidden, targets, weights = features.flatten(0, 1), batch.targets.flatten(), batch.weights.flatten()
        bias = None
        if isinstance(module, BidirectionalEncoder):
            chosen = _target_positions(weights, batch.target_count)
            hidden, targets, weights = module.transform_features(hidden[chosen]), targets[chosen], weights[chosen]
            bias = module.head["bias"]
        vocabulary = vocabulary_shard_of(module)
        return linear_cross_entropy(
            hidden, module.head_weight(), bias, targets=targets, weights=weights, vocabulary=vocabulary
        )

    return loss_sum


def _target_positions(weights: Tensor, count: int | None) -> Tensor:
    """Positions of the targets, of which there are `count` if it is known: the head, most of the work, runs only there.
    Positions of weight 0 pad their number to a multiple, because CPU kernels cache memory for each new size."""
    count = int(weights.count_nonzero()) if count is None else count
    order = weights.ne(0).to(torch.uint8).argsort(descending=True, stable=True)
    return order[: padded_targets(count)].clone()  # a copy, so that backward does not keep the full order


def _num_row_classes(settings: TransformerSettings) -> int | None:
    return settings.classes if isinstance(settings, EncoderSettings) and settings.head == "classify" else None


def _loss_from_logits(
    logits: Callable[[Batch], Tensor], module: nn.Module, needs: DataRequirements | None = None
) -> Callable[[Batch], Tensor]:
    def loss_sum(batch: Batch) -> Tensor:
        scores = logits(batch)
        check_prediction_shape(scores.shape[:-1], batch, module)
        vocabulary = vocabulary_shard_of(module)
        if needs is not None:
            check_num_logits(vocabulary.size if vocabulary else scores.shape[-1], needs, module)
        targets, weights = batch.targets.flatten(), batch.weights.flatten()
        return cross_entropy(scores.flatten(0, -2), targets, weights, vocabulary=vocabulary)

    return loss_sum
