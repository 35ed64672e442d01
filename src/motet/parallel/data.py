"""Data parallelism on flat gradients: every rank holds the whole model and sums its gradients with the others'."""

from torch import Tensor, nn

from motet.collectives.execute import Ranks, all_reduce, broadcast
from motet.core import trace
from motet.precision.master import FlatWeights


def reduce_gradients(weights: list[FlatWeights], ranks: Ranks) -> None:
    """Sum the gradients over the ranks after the whole backward, one collective per flat tensor."""
    with trace.span("communicate"):
        for flat in weights:
            all_reduce(flat.grad, ranks)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the state of a module: running statistics, say, but no tables that it can remake."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, inner in module.named_modules()
        for name, buffer in inner._buffers.items()  # a state_dict would say it too, but costs more than a step may
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def agree_on_buffers(module: nn.Module, ranks: Ranks) -> None:
    """Buffers become the first rank's: there is one of each, in every step, evaluation and checkpoint."""
    for buffer in saved_buffers(module).values():
        broadcast(buffer.detach(), ranks)


def agree_on_values(module: nn.Module, weights: list[FlatWeights], ranks: Ranks) -> None:
    """Everyone starts from the first rank's values, whatever a module was initialised from."""
    for flat in weights:
        broadcast(flat.master, ranks)
        flat.publish()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            broadcast(parameter.data, ranks)
    agree_on_buffers(module, ranks)
