"""Checks of a module, its inputs and its outputs: a mistake raises one sentence where torch would fail deep inside.
Sizes are compared, never values: on a GPU reading values would wait for them, and an index out of range is fatal."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError, check_input


@dataclass(frozen=True)
class DataRequirements:
    """The sizes that the data needs of a model."""

    vocab_size: int  # Of its input
    num_classes: int | None = None  # Of its output; None if targets are tokens


def check_sequence_length(tokens: Tensor, context: int, setting: str = "model.context") -> None:
    """Raise if the sequence is longer than the context, which is set by `setting`."""
    problem = f"a sequence of {tokens.shape[1]} tokens does not fit {setting} = {context}"
    check_input(tokens.shape[1] <= context, f"{problem}; shorten data.sequence_length or lengthen {setting}")


def check_parameters(parameters: Mapping[str, nn.Parameter], source: str) -> None:
    """Raise if a parameter has no real values; the message begins with `source`."""
    for name, parameter in parameters.items():
        problem = f"{source}: parameter {name!r}"
        has_shape = not isinstance(parameter, nn.parameter.UninitializedParameter)
        check_input(has_shape, f"{problem} has no shape before a first forward; give it a fixed shape")
        check_input(not parameter.is_meta, f"{problem} is on the meta device; give it values on the CPU")
        check_input(not parameter.is_complex(), f"{problem} is complex; keep its real and imaginary part as two")


def check_prediction_shape(predicted: torch.Size, batch: Batch, module: nn.Module) -> None:
    """Raise unless the module predicts once for each target."""
    shape = batch.targets.shape
    problem = f"{type(module).__name__} makes predictions of shape {list(predicted)}, but the targets are {list(shape)}"
    check_input(predicted == shape, f"{problem}; set data.objective to what the model is for")


def check_num_logits(num_logits: int, requirements: DataRequirements, module: nn.Module) -> None:
    """Raise if there are fewer logits than possible targets."""
    needed = requirements.num_classes or requirements.vocab_size
    problem = f"{type(module).__name__} gives {num_logits} logits for each target, but there are {needed}"
    what = "tokens of data.tokenizer" if requirements.num_classes is None else "classes in the data"
    check_input(num_logits >= needed, f"{problem} {what}; make it {needed} or more")


def with_loss_checks(
    module: nn.Module, loss_sum: Callable[[Batch], object], requirements: DataRequirements | None
) -> Callable[[Batch], Tensor]:
    """The same loss, checked to be one number and, in training, to have a gradient."""
    name, vocab_size = type(module).__name__, requirements and requirements.vocab_size

    def checked(batch: Batch) -> Tensor:
        nonlocal vocab_size
        with _check_embedding_rows(module, batch.tokens, vocab_size) if vocab_size else nullcontext():
            loss = loss_sum(batch)
        vocab_size = None  # checked in the first call
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            problem = f"{name}.loss_sum must give a tensor of one number, not {what}"
            raise InputError(f"{problem}; sum the weighted losses of the batch")
        check_input(
            loss.requires_grad or not torch.is_grad_enabled(),
            f"the loss of {name} has no gradient: it depends on no trained parameter; "
            "leave out detach(), no_grad() and item() before it, or freeze less",
        )
        return loss

    return checked


@contextmanager
def _check_embedding_rows(module: nn.Module, token_ids: Tensor, vocab_size: int) -> Iterator[None]:
    def check(table: nn.Module, inputs: tuple[Tensor, ...], *, name: str) -> None:
        if inputs and inputs[0].untyped_storage().data_ptr() == token_ids.untyped_storage().data_ptr():
            raise InputError(
                f"{type(module).__name__}.{name} has {table.num_embeddings} rows, but there are {vocab_size} tokens of "
                f"data.tokenizer; make it {vocab_size} rows or more, or take another tokenizer"
            )

    tables = [
        (n, m) for n, m in module.named_modules() if isinstance(m, nn.Embedding) and m.num_embeddings < vocab_size
    ]
    handles = [table.register_forward_pre_hook(partial(check, name=name)) for name, table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
