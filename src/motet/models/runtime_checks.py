"""What a module that is not ours must keep to: each slip is told in a sentence, where torch would fail deep inside.

Sizes are compared, never values: on a GPU a look at values would wait for them, and an index out of range ends it all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError


@dataclass(frozen=True)
class DataRequirements:
    """What the data asks of a model."""

    vocab_size: int  # That it must be able to read
    num_classes: int | None = None  # That it must tell apart; None: its targets are tokens


def check_prediction_shape(predicted: torch.Size, batch: Batch, module: nn.Module) -> None:
    """There is one prediction for each target."""
    if predicted != batch.targets.shape:
        raise InputError(
            f"{type(module).__name__} predicts for {list(predicted)} places, but the targets are "
            f"{list(batch.targets.shape)}; set data.objective to what the model is for"
        )


def check_num_logits(num_logits: int, requirements: DataRequirements, module: nn.Module) -> None:
    """There is one logit for whatever a target can be."""
    needed = requirements.vocab_size if requirements.num_classes is None else requirements.num_classes
    if num_logits < needed:
        what = "tokens of data.tokenizer" if requirements.num_classes is None else "classes in the data"
        raise InputError(
            f"{type(module).__name__} gives {num_logits} logits for each target, but there are {needed} {what}; "
            f"make it {needed} or more"
        )


def with_loss_checks(
    module: nn.Module, loss_sum: Callable[[Batch], object], requirements: DataRequirements | None
) -> Callable[[Batch], Tensor]:
    """The same loss, which is known to be one number, and in training to lead back to parameters."""
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
                f"the loss of {name} has no gradient: nothing that is trained takes part in it; "
                "leave out detach(), no_grad() and item() on the way to it, or freeze less"
            )
        return loss

    return checked


@contextmanager
def _check_embedding_rows(module: nn.Module, token_ids: Tensor, vocab_size: int) -> Iterator[None]:
    """Refuse a table that is asked for the tokens of the batch and has no row for some other token."""

    def add_check(name: str, table: nn.Embedding) -> torch.utils.hooks.RemovableHandle:
        def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs and inputs[0].untyped_storage().data_ptr() == token_ids.untyped_storage().data_ptr():
                raise InputError(
                    f"{type(module).__name__}.{name} has {table.num_embeddings} rows, but there are {vocab_size} tokens of "
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
