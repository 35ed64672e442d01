"""Checks of a module, its inputs and its outputs: a mistake raises one sentence where torch would fail deep inside.

Sizes are compared, never values: on a GPU reading values would wait for them, and an index out of range is fatal.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

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
    if tokens.shape[1] > context:
        raise InputError(
            f"a sequence of {tokens.shape[1]} tokens does not fit {setting} = {context}; "
            f"shorten data.sequence_length or lengthen {setting}"
        )


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
    if predicted != batch.targets.shape:
        raise InputError(
            f"{type(module).__name__} makes predictions of shape {list(predicted)}, but the targets are "
            f"{list(batch.targets.shape)}; set data.objective to what the model is for"
        )


def check_num_logits(num_logits: int, requirements: DataRequirements, module: nn.Module) -> None:
    """Raise if there are fewer logits than possible targets."""
    tokens = (requirements.vocab_size, "tokens of data.tokenizer")
    needed, what = tokens if requirements.num_classes is None else (requirements.num_classes, "classes in the data")
    if num_logits < needed:
        raise InputError(
            f"{type(module).__name__} gives {num_logits} logits for each target, but there are {needed} {what}; "
            f"make it {needed} or more"
        )


def with_loss_checks(
    module: nn.Module, loss_sum: Callable[[Batch], object], requirements: DataRequirements | None
) -> Callable[[Batch], Tensor]:
    """The same loss, checked to be one number and, in training, to have a gradient."""
    is_first_call = requirements is not None

    def checked(batch: Batch) -> Tensor:
        nonlocal is_first_call
        with (
            _check_embedding_rows(module, batch.tokens, requirements.vocab_size)
            if requirements and is_first_call
            else nullcontext()
        ):
            loss = loss_sum(batch)
        is_first_call = False
        name = type(module).__name__
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"{name}.loss_sum must give a tensor of one number, not {what}; sum the weighted losses of the batch"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError(
                f"the loss of {name} has no gradient: it depends on no trained parameter; "
                "leave out detach(), no_grad() and item() before it, or freeze less"
            )
        return loss

    return checked


@contextmanager
def _check_embedding_rows(module: nn.Module, token_ids: Tensor, vocab_size: int) -> Iterator[None]:
    def add_check(name: str, table: nn.Embedding) -> torch.utils.hooks.RemovableHandle:
        def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs and inputs[0].untyped_storage().data_ptr() == token_ids.untyped_storage().data_ptr():
                raise InputError(
                    f"{type(module).__name__}.{name} has {table.num_embeddings} rows, but there are {vocab_size} "
                    "tokens of "
                    f"data.tokenizer; make it {vocab_size} rows or more, or take another tokenizer"
                )

        return table.register_forward_pre_hook(check)

    tables = [(name, table) for name, table in module.named_modules() if isinstance(table, nn.Embedding)]
    handles = [add_check(name, table) for name, table in tables if table.num_embeddings < vocab_size]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
