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
class Demands:
    """What the data asks of a model."""

    tokens: int
    """That it must be able to read."""
    classes: int | None = None
    """That it must tell apart; None: its targets are tokens."""


def check_places(predicted: torch.Size, batch: Batch, module: nn.Module) -> None:
    """There is one prediction for each target."""
    if predicted != batch.targets.shape:
        raise InputError(
            f"{type(module).__name__} predicts for {list(predicted)} places, but the targets are "
            f"{list(batch.targets.shape)}; set data.objective to what the model is for"
        )


def check_outcomes(outcomes: int, demands: Demands, module: nn.Module) -> None:
    """There is one logit for whatever a target can be."""
    needed = demands.tokens if demands.classes is None else demands.classes
    if outcomes < needed:
        what = "tokens of data.tokenizer" if demands.classes is None else "classes in the data"
        raise InputError(
            f"{type(module).__name__} gives {outcomes} logits for each target, but there are {needed} {what}; "
            f"make it {needed} or more"
        )


def checked_loss(
    module: nn.Module, loss_sum: Callable[[Batch], object], demands: Demands | None
) -> Callable[[Batch], Tensor]:
    """The same loss, which is known to be one number, and in training to lead back to parameters."""
    unread = demands is not None

    def checked(batch: Batch) -> Tensor:
        nonlocal unread
        with _tables_watched(module, batch.tokens, demands.tokens) if demands and unread else nullcontext():
            loss = loss_sum(batch)
        unread = False
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
def _tables_watched(module: nn.Module, read: Tensor, tokens: int) -> Iterator[None]:
    """Refuse a table that is asked for the tokens of the batch and has no row for some other token."""

    def watch(name: str, table: nn.Embedding) -> torch.utils.hooks.RemovableHandle:
        def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs and inputs[0].untyped_storage().data_ptr() == read.untyped_storage().data_ptr():
                raise InputError(
                    f"{type(module).__name__}.{name} has {table.num_embeddings} rows, but there are {tokens} tokens of "
                    f"data.tokenizer; make it {tokens} rows or more, or take another tokenizer"
                )

        return table.register_forward_pre_hook(check)

    tables = [(name, table) for name, table in module.named_modules() if isinstance(table, nn.Embedding)]
    handles = [watch(name, table) for name, table in tables if table.num_embeddings < tokens]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
