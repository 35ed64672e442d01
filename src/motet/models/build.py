"""From settings to what is trained: a module with its first values, and how it is called on a batch."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.core.seeds import derive_seed
from motet.models import user_module
from motet.models.adapters import apply_adapters_and_freezing
from motet.models.arch.decoder import CausalDecoder
from motet.models.arch.encoder import BidirectionalEncoder
from motet.models.arch.encoder_decoder import EncoderDecoderModel
from motet.models.arch.loss import cross_entropy, linear_cross_entropy
from motet.models.hf import hf_model
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, has_dropout
from motet.models.runtime_checks import DataRequirements, check_num_logits, check_prediction_shape, with_loss_checks
from motet.models.settings import (
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    ModelSettings,
    TransformerSettings,
    UserModuleSettings,
    check_can_be_trained,
)
from motet.models.weight_init import initialize_parameters

_HUGGINGFACE_PREFIX = "hf:"
TARGET_COUNT_MULTIPLE = 64
Randomness = Callable[[int, Tensor], AbstractContextManager[object]]


@dataclass(frozen=True)
class TrainableModel:
    """A model that is ready to be trained."""

    module: nn.Module  # What has the parameters; single-device code
    # The weighted sum of the losses of a micro-batch: a scalar, in float32 at least.
    loss_sum: Callable[[Batch], Tensor]
    logits: Callable[[Batch], Tensor]  # [R, T, V], or [R, classes]
    vocab_size: int | None  # Of what it reads; None: not known
    num_classes: int | None  # How many a target is one of: the vocabulary or the classes; None: not known
    # `with randomness(step, rows): ...` around a forward, so that dropout does not depend on the layout.
    randomness: Randomness
    context: int | None = None  # The longest sequence; None: not known
    has_own_loss: bool = False  # The module has a loss of its own, which alone says what its outputs mean
    is_autoregressive: bool = False  # Whether its logits are those of each next token, so that it can continue a text
    objective: str | None = None  # What it is for, where it is somebody else's and says so


def build_module(settings: ModelSettings) -> nn.Module:
    """The module with whatever values it has, on torch's current default device and dtype."""
    return _build_module(settings, _open_hf_checkpoint(settings))


def _build_module(settings: ModelSettings, checkpoint: hf_model.HuggingFaceCheckpoint | None) -> nn.Module:
    check_can_be_trained(settings)
    if checkpoint is not None:
        return hf_model.build_hf_model(checkpoint)
    match settings:
        case DecoderSettings():
            return CausalDecoder(settings)
        case EncoderSettings():
            return BidirectionalEncoder(settings)
        case EncoderDecoderSettings():
            return EncoderDecoderModel(settings)
    return user_module.build_user_module(settings.factory, settings.arguments)


def build_trainable_model(
    settings: ModelSettings,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    requirements: DataRequirements | None = None,
) -> TrainableModel:
    """The module with its initial values from the seed, adapters applied, frozen parameters marked, in train mode.

    What the data asks of a module that is not ours is checked when it is first called.
    """
    checkpoint = _open_hf_checkpoint(settings)
    if isinstance(settings, UserModuleSettings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "module"))
            random.seed(derive_seed(seed, "module"))
            np.random.seed(derive_seed(seed, "module") % 2**32)
            module = _build_module(settings, checkpoint)
    else:
        with torch.device("meta"):
            module = _build_module(settings, None)
        module.to_empty(device="cpu")
        initialize_parameters(module, settings, seed)
    apply_adapters_and_freezing(module, settings, seed)
    _cast_parameters(module, dtype)
    module.to(device).train()
    randomness = LayoutInvariantDropoutMode(derive_seed(seed, "dropout")).for_rows
    if not isinstance(settings, UserModuleSettings):
        return _wrap_transformer(module, settings, randomness)
    if checkpoint is not None:
        return _wrap_huggingface(module, checkpoint, settings, randomness, requirements)
    return _wrap_user_module(module, settings, randomness, requirements)


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: a buffer, as a rotary table, may need more bits than them. In float64 nothing stays below."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        module.to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.contiguous()  # an expanded one could be neither sent nor loaded


# --- how each kind is called -----------------------------------------------------------------------


def _wrap_transformer(module: nn.Module, settings: TransformerSettings, randomness: Randomness) -> TrainableModel:
    return TrainableModel(
        module=module,
        loss_sum=_transformer_loss(module, settings),
        logits=lambda batch: module(**_transformer_inputs(batch, settings)),
        vocab_size=settings.vocab_size,
        num_classes=_num_row_classes(settings) or settings.vocab_size,
        randomness=randomness if settings.dropout > 0 else _no_randomness,
        context=settings.context,
        is_autoregressive=isinstance(settings, DecoderSettings),
    )


def _wrap_user_module(
    module: nn.Module, settings: UserModuleSettings, randomness: Randomness, requirements: DataRequirements | None
) -> TrainableModel:
    logits = user_module.make_logits_function(module)
    loss_sum: Any = getattr(module, "loss_sum", None)
    return TrainableModel(
        module=module,
        loss_sum=with_loss_checks(module, loss_sum or _loss_from_logits(logits, module, requirements), requirements),
        logits=logits,
        vocab_size=settings.vocab_size,
        num_classes=settings.vocab_size,
        randomness=randomness,  # what a module of the user's drops cannot be known from outside
        has_own_loss=loss_sum is not None,
    )


def _wrap_huggingface(
    module: nn.Module,
    checkpoint: hf_model.HuggingFaceCheckpoint,
    settings: UserModuleSettings,
    randomness: Randomness,
    requirements: DataRequirements | None,
) -> TrainableModel:
    vocab_size = getattr(checkpoint.config, "vocab_size", None)
    if settings.vocab_size not in (None, vocab_size):
        raise InputError(
            f"model.vocab_size = {settings.vocab_size}, but the config of {settings.factory} has {vocab_size}; "
            "leave it out, or set model.arguments.vocab_size"
        )
    logits = hf_model.make_logits_function(module, checkpoint)
    return TrainableModel(
        module=module,
        loss_sum=with_loss_checks(module, _loss_from_logits(logits, module, requirements), requirements),
        logits=logits,
        vocab_size=vocab_size,
        num_classes=checkpoint.config.num_labels if checkpoint.kind == "classify" else vocab_size,
        randomness=randomness if has_dropout(module, checkpoint.config.to_dict()) else _no_randomness,
        context=hf_model.max_context(checkpoint),
        is_autoregressive=checkpoint.kind == "causal",
        objective="spans" if checkpoint.kind == "encoder-decoder" else checkpoint.kind,
    )


def _open_hf_checkpoint(settings: ModelSettings) -> hf_model.HuggingFaceCheckpoint | None:
    if not (isinstance(settings, UserModuleSettings) and settings.factory.startswith(_HUGGINGFACE_PREFIX)):
        return None
    return hf_model.open_hf_checkpoint(settings.factory.removeprefix(_HUGGINGFACE_PREFIX), settings.arguments)


def _no_randomness(step: int, rows: Tensor) -> AbstractContextManager[object]:
    return nullcontext()


def _transformer_inputs(batch: Batch, settings: TransformerSettings) -> dict[str, Tensor | None]:
    if not isinstance(settings, EncoderDecoderSettings):
        return {"tokens": batch.tokens, "positions": batch.positions, "documents": batch.documents}
    if batch.source is None:
        raise InputError("an encoder-decoder reads a source besides its tokens; set data.objective = 'spans'")
    return {
        "tokens": batch.tokens,
        "source": batch.source,
        "documents": batch.documents,
        "source_documents": batch.source_documents,
    }


def _transformer_loss(module: nn.Module, settings: TransformerSettings) -> Callable[[Batch], Tensor]:
    """Through the features, so that all logits are never held at once; a class of a row has few enough."""
    if _num_row_classes(settings):
        return _loss_from_logits(lambda batch: module(**_transformer_inputs(batch, settings)), module, None)
    assert isinstance(module, CausalDecoder | BidirectionalEncoder | EncoderDecoderModel)

    def loss_sum(batch: Batch) -> Tensor:
        features = module.features(**_transformer_inputs(batch, settings))  # type: ignore[arg-type]  # by its family
        check_prediction_shape(features.shape[:-1], batch, module)
        hidden, targets, weights = features.flatten(0, 1), batch.targets.flatten(), batch.weights.flatten()
        if isinstance(module, BidirectionalEncoder):
            target_positions = _target_positions(weights)
            hidden, targets, weights = (
                module.transform_features(hidden[target_positions]),
                targets[target_positions],
                weights[target_positions],
            )
        return linear_cross_entropy(hidden, module.head_weight(), module.head_bias(), targets, weights)

    return loss_sum


def _target_positions(weights: Tensor) -> Tensor:
    """The places of the targets, which are few: the head, most of the work, is for them alone.

    Their number is filled up with others (of weight 0): CPU kernels keep something for each size that they have seen.
    """
    order = weights.ne(0).to(torch.uint8).argsort(descending=True, stable=True)
    count = int(weights.count_nonzero())
    padded_count = -(-max(count, 1) // TARGET_COUNT_MULTIPLE) * TARGET_COUNT_MULTIPLE
    return order[:padded_count].clone()  # not the whole order, which backward would keep


def _num_row_classes(settings: TransformerSettings) -> int | None:
    """How many classes of rows it tells apart; None: its targets are tokens."""
    return settings.classes if isinstance(settings, EncoderSettings) and settings.head == "classify" else None


def _loss_from_logits(
    logits: Callable[[Batch], Tensor], module: nn.Module, requirements: DataRequirements | None
) -> Callable[[Batch], Tensor]:
    def loss_sum(batch: Batch) -> Tensor:
        scores = logits(batch)
        check_prediction_shape(scores.shape[:-1], batch, module)
        if requirements is not None:
            check_num_logits(scores.shape[-1], requirements, module)
        return cross_entropy(scores.flatten(0, -2), batch.targets.flatten(), batch.weights.flatten())

    return loss_sum
