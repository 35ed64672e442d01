"""Weighted sums of cross-entropies: of logits, or of a linear head fused with its loss.
The fused loss holds the logits of one block of rows. It computes the gradients of the head's input and weight in the
forward pass; in float16 in the backward pass, which knows the scale of the loss. Softmax overwrites the logits with
their errors, in one kernel or over chunks that stay in the cache. Softmax and loss are in float32 at least.

Ranks that split the vocabulary compute the logits of their entries and never exchange them: for each block they reduce
the log-sum-exp of each row and the logit of its target. Padding after the entries takes no part, whatever its values.

The vocabulary entries that a rank holds, where tensor-parallel ranks split them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.errors import check_input
from motet.models.arch.layers import accumulation_dtype
from motet.models.arch.logit_slices import (
    DEFAULT_SOFTMAX_CHUNK_BYTES,
    LOGITS_BLOCK_BYTES,
    SOFTMAX_CHUNK_BYTES,
    even_row_slices,
)
from motet.models.kernels.autograd_backward import single_backward
from motet.models.kernels.choice import chosen, in_triton

Function = TypeVar("Function", bound=Callable[..., Any])


class VocabularyShard(Protocol):
    """A rank's entries of a vocabulary, and the communication with the ranks that hold the others."""

    @property
    def start(self) -> int:
        """The first entry of this rank."""
        ...

    @property
    def stop(self) -> int:
        """The end of its entries; a rank whose share is all padding has start == stop."""
        ...

    @property
    def size(self) -> int:
        """Entries of the whole vocabulary; a local tensor has ceil(size / ranks), with padding after the last."""
        ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over the ranks, without a gradient."""
        ...

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        """[..., size] on every rank, from the local logits of all ranks, without a gradient or padding."""
        ...


_SHARDS: WeakKeyDictionary[nn.Module, VocabularyShard] = WeakKeyDictionary()


def set_vocabulary_shard(module: nn.Module, shard: VocabularyShard | None) -> None:
    """Restrict the logits of a module to the entries of its rank, or with None to all entries."""
    _SHARDS.pop(module, None)
    if shard is not None:
        _SHARDS[module] = shard


def vocabulary_shard_of(module: nn.Module) -> VocabularyShard | None:
    """The entries that the logits of a module are for; None: all of them."""
    return _SHARDS.get(module)


def gather_whole_logits(logits: Tensor, module: nn.Module) -> Tensor:
    """The logits of all entries, from the logits of a module on this rank; without a gradient if ranks split them."""
    shard = vocabulary_shard_of(module)
    return logits if shard is None else shard.gather_logits(logits)


class LogitsProjection(nn.Module):
    """The product of a head whose tensors belong to other modules, so that ranks can communicate at its input."""

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., H] -> logits [..., V]."""
        return F.linear(hidden, weight, bias)


_IGNORED_TARGET = -100  # The value of torch's cross-entropy


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, *, vocabulary: VocabularyShard | None = None
) -> Tensor:
    """Sum of weights x cross-entropy. logits [N, V], or those of a rank's entries; targets [N], weights [N]."""
    if vocabulary is not None:
        is_ignored = targets == _IGNORED_TARGET
        targets, weights = targets.masked_fill(is_ignored, 0), weights.masked_fill(is_ignored, 0)
        return cast(Tensor, _ShardedCrossEntropy.apply(logits, targets, weights, vocabulary))  # type: ignore[no-untyped-call]  # untyped in torch
    logits = logits.to(accumulation_dtype(logits))
    return (F.cross_entropy(logits, targets, reduction="none") * weights.to(logits.dtype)).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    targets: Tensor,
    weights: Tensor,
    vocabulary: VocabularyShard | None = None,
    block_bytes: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, ...)`. hidden [N, H], weight [V, H], bias [V].
    With a vocabulary shard, weight and bias are those of the rank's entries, and `hidden` gets the gradient of all.
    The logits of a block of rows have `block_bytes`, by default `LOGITS_BLOCK_BYTES` of the device."""
    blocks = vocabulary, block_bytes or LOGITS_BLOCK_BYTES.get(hidden.device.type, LOGITS_BLOCK_BYTES["cpu"])
    return cast(
        Tensor,
        _FusedLinearCrossEntropy.apply(hidden, weight, bias, targets, weights, *blocks),  # type: ignore[no-untyped-call]  # untyped in torch
    )


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        vocabulary: VocabularyShard | None,
        block_bytes: int,
    ) -> Tensor:
        split = {"vocabulary": vocabulary, "block_bytes": block_bytes}
        rest: dict[str, Any] = {"targets": targets, "weights": weights, **split}
        ctx.split, ctx.is_scaled = split, hidden.dtype == torch.float16
        if ctx.is_scaled:  # Gradients are rounded once they are multiplied by the scale of the loss
            ctx.save_for_backward(hidden, weight, bias, targets, weights)
            return _blockwise_loss(hidden, weight, bias, **rest, needs_grad=(False,) * 3)[0]
        total, gradients = _blockwise_loss(hidden, weight, bias, **rest, needs_grad=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        if ctx.is_scaled:
            hidden, weight, bias, targets, weights = cast(tuple[Any, ...], saved)
            needs_grad, scaled = ctx.needs_input_grad[:3], weights * grad_total
            rest: dict[str, Any] = {"targets": targets, "weights": scaled, **ctx.split}
            _, saved = _blockwise_loss(hidden, weight, bias, **rest, needs_grad=needs_grad)
        elif grad_total.device.type != "cpu":  # To compare would wait for the device; a second backward is refused
            saved = tuple(None if g is None else g.mul_(grad_total.to(g.dtype)) for g in saved)
        elif grad_total != 1.0:  # `loss_sum.backward()` needs no scaling
            saved = tuple(None if g is None else g * grad_total.to(g.dtype) for g in saved)
        return (*saved, None, None, None, None)


def _blockwise_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    targets: Tensor,
    weights: Tensor,
    vocabulary: VocabularyShard | None,
    block_bytes: int,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the gradients of hidden, weight and bias that are needed."""
    loss_dtype = accumulation_dtype(hidden)
    # Errors of float16 are multiplied by weights before they are rounded, since most of them are tiny.
    block_dtype = loss_dtype if hidden.dtype == torch.float16 else hidden.dtype
    entries = slice(weight.shape[0] if vocabulary is None else vocabulary.stop - vocabulary.start)
    total = torch.zeros((), dtype=loss_dtype, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=loss_dtype) if needs_grad[1] else None
    grad_bias = torch.zeros_like(bias, dtype=loss_dtype) if needs_grad[2] and bias is not None else None
    # Rows with padding, so that all ranks have equally many blocks.
    for block in even_row_slices(hidden.shape[0], block_bytes // (block_dtype.itemsize * weight.shape[0])):
        rows, scale = hidden[block], weights[block].to(loss_dtype).unsqueeze(1)
        logits = F.linear(rows, weight[entries], bias if bias is None else bias[entries]).to(block_dtype)
        losses = _losses(logits, targets[block], overwrite_with_errors=any(needs_grad), vocabulary=vocabulary)
        total += (losses * scale).sum()
        if block_dtype != rows.dtype:
            logits, scale = logits.mul_(scale).to(rows.dtype), torch.ones_like(scale)
        errors, scale = logits, scale.to(rows.dtype)  # overwritten if there is a gradient
        if grad_hidden is not None:
            write_input_gradient(errors, weight[entries], scale, output=grad_hidden[block])
        if grad_weight is not None and grad_weight.dtype == rows.dtype:
            grad_weight[entries].addmm_(errors.t(), rows * scale)
        elif grad_weight is not None:
            grad_weight[entries].add_(errors.t() @ (rows * scale))
        if grad_bias is not None:
            grad_bias[entries].add_((errors.t() @ scale).squeeze(1))
        del logits, errors  # Freed before the next block allocates
    if grad_hidden is not None and vocabulary is not None:
        vocabulary.all_reduce(grad_hidden, "sum")
    return total, tuple(g if g is None else g.to(weight.dtype) for g in (grad_hidden, grad_weight, grad_bias))


def write_input_gradient(errors: Tensor, weight: Tensor, scale: Tensor, *, output: Tensor) -> None:
    """Write the gradient of the input of a head. errors [N, V], weight [V, H], scale [N, 1]."""
    torch.mm(errors, weight, out=output)
    output.mul_(scale)


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the logits of a rank's entries, whose gradient stays on the rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, vocabulary: VocabularyShard) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()  # Kernels read rows
        logsumexp, losses = _reduce_over_ranks(logits[:, : vocabulary.stop - vocabulary.start], targets, vocabulary)
        scale = weights.to(losses.dtype).unsqueeze(1)
        ctx.save_for_backward(logits, logsumexp, targets, scale)
        ctx.vocabulary = vocabulary
        return (losses * scale).sum()

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        logits, logsumexp, targets, scale = ctx.saved_tensors
        grad_logits, entries = torch.zeros_like(logits), slice(ctx.vocabulary.stop - ctx.vocabulary.start)
        logits, errors, scale = logits[:, entries], grad_logits[:, entries], scale * grad_total
        for rows in _softmax_chunks(logits):
            numbers = logits[rows], logsumexp[rows], targets[rows]
            _write_errors(*numbers, vocabulary=ctx.vocabulary, output=errors[rows], scale=scale[rows])
        return grad_logits, None, None, None


def _losses(
    logits: Tensor, targets: Tensor, *, overwrite_with_errors: bool, vocabulary: VocabularyShard | None
) -> Tensor:
    """[N, 1] from logits [N, V], which may be overwritten with their errors: probabilities minus targets."""
    if vocabulary is not None:
        logsumexp, losses = _reduce_over_ranks(logits, targets, vocabulary)
        for rows in _softmax_chunks(logits) if overwrite_with_errors else ():
            _write_errors(logits[rows], logsumexp[rows], targets[rows], vocabulary=vocabulary, output=logits[rows])
        return losses
    return _kernel(logits, "losses_of_rows", _plain_losses)(logits, targets, overwrites=overwrite_with_errors)


def _kernel(logits: Tensor, name: str, plain: Function) -> Function:
    """The function of this name in Triton, or its plain definition."""
    is_in_triton = chosen("cross_entropy", logits) == "triton"
    return cast(Function, in_triton("triton_cross_entropy", name)) if is_in_triton else plain


def _plain_losses(logits: Tensor, targets: Tensor, *, overwrites: bool) -> Tensor:
    # Allocated before the chunks, because small tensors between large ones would keep malloc from using memory again.
    losses = logits.new_empty(len(logits), 1, dtype=accumulation_dtype(logits))
    for rows in _softmax_chunks(logits):
        chunk, target = logits[rows], targets[rows].unsqueeze(1)
        probabilities = torch.softmax(chunk, dim=1, dtype=losses.dtype)
        # log-sum-exp through the largest logit, whose probability is at least 1/V: no second pass of exponentials.
        largest, argmax = chunk.max(dim=1, keepdim=True)
        logsumexp = largest.to(losses.dtype) - probabilities.gather(1, argmax).log()
        torch.sub(logsumexp, chunk.gather(1, target).to(losses.dtype), out=losses[rows])
        if overwrites:
            probabilities.scatter_add_(1, target, torch.full_like(logsumexp, -1.0))
            chunk.copy_(probabilities)
    return losses


def _reduce_over_ranks(logits: Tensor, targets: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(log-sum-exp over the entries of all ranks, losses), both [N, 1], from the logits of this rank's entries."""
    size = vocabulary.size
    is_outside = (targets < 0) | (targets >= size)
    if targets.device.type == "cpu":  # On a device the host would wait for the values; losses are NaN there
        outside = targets[is_outside]
        problem = f"target {outside[:1].tolist()} is outside of the vocabulary, which has {size} entries"
        check_input(not len(outside), f"{problem}; make the vocabulary larger, or take another tokenizer")
    statistics = _kernel(logits, "statistics_of_rows", _plain_statistics)
    local, target_logit = statistics(logits, *_local_targets(targets, vocabulary))
    largest = vocabulary.all_reduce(local.clone(), "max")  # Without it, exponentials of large logits overflow
    sums = vocabulary.all_reduce(torch.stack([(local - largest).exp(), target_logit]), "sum")
    logsumexp = largest + sums[0].log()
    return logsumexp, (logsumexp - sums[1]).masked_fill_(is_outside.unsqueeze(1), float("nan"))


def _plain_statistics(logits: Tensor, column: Tensor, is_here: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its logit at the target, 0 where the target is not here; all [N, 1]."""
    local = logits.new_empty(len(logits), 1, dtype=accumulation_dtype(logits))
    for rows in _softmax_chunks(logits):
        local[rows] = logits[rows].to(local.dtype).logsumexp(dim=1, keepdim=True)
    target_logit = torch.zeros_like(local)
    if logits.shape[1]:  # A rank whose share is all padding has no logit
        target_logit = torch.where(is_here, logits.gather(1, column).to(local.dtype), target_logit)
    return local, target_logit


def _write_errors(
    logits: Tensor,
    logsumexp: Tensor,
    targets: Tensor,
    *,
    vocabulary: VocabularyShard,
    output: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Probabilities of this rank's entries, minus 1 at the target where it is one of them, times the scale."""
    column, is_here = _local_targets(targets, vocabulary)
    write = _kernel(logits, "write_errors", _plain_errors)
    write(logits, logsumexp, column, is_here=is_here, output=output, scale=scale)


def _plain_errors(
    logits: Tensor, logsumexp: Tensor, column: Tensor, *, is_here: Tensor, output: Tensor, scale: Tensor | None
) -> None:
    probabilities = (logits.to(logsumexp.dtype) - logsumexp).exp_()
    if logits.shape[1]:
        probabilities.scatter_add_(1, column, -is_here.to(logsumexp.dtype))
    output.copy_(probabilities if scale is None else probabilities.mul_(scale))


def _local_targets(targets: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """[N, 1] each: the column of the target in this rank's logits, any where it has none, and whether it has one."""
    column = targets.unsqueeze(1) - vocabulary.start
    entries = vocabulary.stop - vocabulary.start
    return column.clamp(0, max(entries - 1, 0)), (column >= 0) & (column < entries)


def _softmax_chunks(logits: Tensor) -> Iterator[slice]:
    """Rows whose probabilities exist together; all rows where a kernel overwrites the logits without a copy."""
    if chosen("cross_entropy", logits) == "triton":
        return iter((slice(0, len(logits)),))
    budget = SOFTMAX_CHUNK_BYTES.get(logits.device.type, DEFAULT_SOFTMAX_CHUNK_BYTES)
    row_bytes = accumulation_dtype(logits).itemsize * logits.shape[1]
    return even_row_slices(logits.shape[0], budget // max(row_bytes, 1))
