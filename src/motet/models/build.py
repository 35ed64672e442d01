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
from motet.models import factory, huggingface
from motet.models.adapters import prepare_training
from motet.models.checks import Demands, check_outcomes, check_places, checked_loss
from motet.models.decoder import Decoder
from motet.models.encoder import Encoder
from motet.models.encoder_decoder import EncoderDecoder
from motet.models.initial import initialise
from motet.models.loss import cross_entropy, linear_cross_entropy
from motet.models.randomness import LogicalRandomness, can_drop
from motet.models.settings import (
    Architecture,
    DecoderSettings,
    EncoderDecoderSettings,
    EncoderSettings,
    ModelSettings,
    ModuleSettings,
    check_trainable,
)

_HUGGINGFACE = "hf:"
TARGETS_IN_STEPS_OF = 64
Randomness = Callable[[int, Tensor], AbstractContextManager[object]]


@dataclass(frozen=True)
class Trainee:
    """A model that is ready to be trained."""

    module: nn.Module
    """What has the parameters; single-device code."""
    loss_sum: Callable[[Batch], Tensor]
    """The weighted sum of the losses of a micro-batch: a scalar, in float32 at least."""
    logits: Callable[[Batch], Tensor]
    """[R, T, V], or [R, classes]."""
    vocab_size: int | None
    """Of what it reads; None: not known."""
    outcomes: int | None
    """How many a target is one of: the vocabulary or the classes; None: not known."""
    randomness: Randomness
    """`with randomness(step, rows): ...` around a forward, so that dropout does not depend on the layout."""
    context: int | None = None
    """The longest sequence; None: not known."""
    own_loss: bool = False
    """The module has a loss of its own, which alone says what its outputs mean."""
    continues: bool = False
    """Whether its logits are those of each next token, so that it can continue a text."""
    objective: str | None = None
    """What it is for, where it is somebody else's and says so."""


def build_module(settings: ModelSettings) -> nn.Module:
    """The module with whatever values it has, on torch's current default device and dtype."""
    return _module(settings, _checkpoint(settings))


def _module(settings: ModelSettings, checkpoint: huggingface.Checkpoint | None) -> nn.Module:
    check_trainable(settings)
    if checkpoint is not None:
        return huggingface.build_huggingface(checkpoint)
    match settings:
        case DecoderSettings():
            return Decoder(settings)
        case EncoderSettings():
            return Encoder(settings)
        case EncoderDecoderSettings():
            return EncoderDecoder(settings)
    return factory.make_module(settings.factory, settings.arguments)


def build_trainee(
    settings: ModelSettings, seed: int, dtype: torch.dtype, device: torch.device, demands: Demands | None = None
) -> Trainee:
    """The module with its initial values from the seed, adapters applied, frozen parameters marked, in train mode.

    What the data asks of a module that is not ours is checked when it is first called.
    """
    checkpoint = _checkpoint(settings)
    if isinstance(settings, ModuleSettings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "module"))
            random.seed(derive_seed(seed, "module"))
            np.random.seed(derive_seed(seed, "module") % 2**32)
            module = _module(settings, checkpoint)
    else:
        with torch.device("meta"):
            module = _module(settings, None)
        module.to_empty(device="cpu")
        initialise(module, settings, seed)
    prepare_training(module, settings, seed)
    _cast(module, dtype)
    module.to(device).train()
    randomness = LogicalRandomness(derive_seed(seed, "dropout")).at
    if not isinstance(settings, ModuleSettings):
        return _of_ours(module, settings, randomness)
    if checkpoint is not None:
        return _of_huggingface(module, checkpoint, settings, randomness, demands)
    return _of_factory(module, settings, randomness, demands)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: a buffer, as a rotary table, may need more bits than them. In float64 nothing stays below."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:
        module.to(dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.contiguous()  # an expanded one could be neither sent nor loaded


# --- how each kind is called -----------------------------------------------------------------------


def _of_ours(module: nn.Module, settings: Architecture, randomness: Randomness) -> Trainee:
    return Trainee(
        module=module,
        loss_sum=_own_loss(module, settings),
        logits=lambda batch: module(**_own_inputs(batch, settings)),
        vocab_size=settings.vocab_size,
        outcomes=_classes_of(settings) or settings.vocab_size,
        randomness=randomness if settings.dropout > 0 else _nothing_random,
        context=settings.context,
        continues=isinstance(settings, DecoderSettings),
    )


def _of_factory(
    module: nn.Module, settings: ModuleSettings, randomness: Randomness, demands: Demands | None
) -> Trainee:
    logits = factory.logits_of(module)
    loss_sum: Any = getattr(module, "loss_sum", None)
    return Trainee(
        module=module,
        loss_sum=checked_loss(module, loss_sum or _loss_of(logits, module, demands), demands),
        logits=logits,
        vocab_size=settings.vocab_size,
        outcomes=settings.vocab_size,
        randomness=randomness,  # what a module of the user's drops cannot be known from outside
        own_loss=loss_sum is not None,
    )


def _of_huggingface(
    module: nn.Module,
    checkpoint: huggingface.Checkpoint,
    settings: ModuleSettings,
    randomness: Randomness,
    demands: Demands | None,
) -> Trainee:
    vocab_size = getattr(checkpoint.config, "vocab_size", None)
    if settings.vocab_size not in (None, vocab_size):
        raise InputError(
            f"model.vocab_size = {settings.vocab_size}, but the config of {settings.factory} has {vocab_size}; "
            "leave it out, or set model.arguments.vocab_size"
        )
    logits = huggingface.logits_of(module, checkpoint)
    return Trainee(
        module=module,
        loss_sum=checked_loss(module, _loss_of(logits, module, demands), demands),
        logits=logits,
        vocab_size=vocab_size,
        outcomes=checkpoint.config.num_labels if checkpoint.kind == "classify" else vocab_size,
        randomness=randomness if can_drop(module, checkpoint.config.to_dict()) else _nothing_random,
        context=huggingface.context_of(checkpoint),
        continues=checkpoint.kind == "causal",
        objective="spans" if checkpoint.kind == "encoder-decoder" else checkpoint.kind,
    )


def _checkpoint(settings: ModelSettings) -> huggingface.Checkpoint | None:
    if not (isinstance(settings, ModuleSettings) and settings.factory.startswith(_HUGGINGFACE)):
        return None
    return huggingface.open_checkpoint(settings.factory.removeprefix(_HUGGINGFACE), settings.arguments)


def _nothing_random(step: int, rows: Tensor) -> AbstractContextManager[object]:
    return nullcontext()


def _own_inputs(batch: Batch, settings: Architecture) -> dict[str, Tensor | None]:
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


def _own_loss(module: nn.Module, settings: Architecture) -> Callable[[Batch], Tensor]:
    """Through the features, so that all logits are never held at once; a class of a row has few enough."""
    if _classes_of(settings):
        return _loss_of(lambda batch: module(**_own_inputs(batch, settings)), module, None)
    assert isinstance(module, Decoder | Encoder | EncoderDecoder)

    def loss_sum(batch: Batch) -> Tensor:
        features = module.features(**_own_inputs(batch, settings))  # type: ignore[arg-type]  # by its family
        check_places(features.shape[:-1], batch, module)
        hidden, targets, weights = features.flatten(0, 1), batch.targets.flatten(), batch.weights.flatten()
        if isinstance(module, Encoder):
            at = _targets_at(weights)
            hidden, targets, weights = module.transformed(hidden[at]), targets[at], weights[at]
        return linear_cross_entropy(hidden, module.head_weight(), module.head_bias(), targets, weights)

    return loss_sum


def _targets_at(weights: Tensor) -> Tensor:
    """The places of the targets, which are few: the head, most of the work, is for them alone.

    Their number is filled up with others (of weight 0): CPU kernels keep something for each size that they have seen.
    """
    order = weights.ne(0).to(torch.uint8).argsort(descending=True, stable=True)
    count = int(weights.count_nonzero())
    filled = -(-max(count, 1) // TARGETS_IN_STEPS_OF) * TARGETS_IN_STEPS_OF
    return order[:filled].clone()  # not the whole order, which backward would keep


def _classes_of(settings: Architecture) -> int | None:
    """How many classes of rows it tells apart; None: its targets are tokens."""
    return settings.classes if isinstance(settings, EncoderSettings) and settings.head == "classify" else None


def _loss_of(
    logits: Callable[[Batch], Tensor], module: nn.Module, demands: Demands | None
) -> Callable[[Batch], Tensor]:
    def loss_sum(batch: Batch) -> Tensor:
        scores = logits(batch)
        check_places(scores.shape[:-1], batch, module)
        if demands is not None:
            check_outcomes(scores.shape[-1], demands, module)
        return cross_entropy(scores.flatten(0, -2), batch.targets.flatten(), batch.weights.flatten())

    return loss_sum
