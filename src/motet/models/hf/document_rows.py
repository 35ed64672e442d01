"""Packed rows unpacked into one row per document, padded at the end, for models that cannot separate documents."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.arch.vocabulary_shard import gather_whole_logits


def logits_by_document(batch: Batch, call: Callable[[dict[str, Any]], Tensor], has_encoder: bool) -> Tensor:
    """The logits of packed rows, from a `call` of the model with one document per row.
    Rows are cut where the document changes; a source belongs to the document of the same row and number."""
    assert batch.documents is not None
    bounds = _document_bounds(batch.documents)
    indices, mask = _token_indices(bounds)
    tokens = batch.tokens.flatten()[indices]
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    if has_encoder and batch.source is not None and batch.source_documents is not None:
        source_bounds = _document_bounds(batch.source_documents)
        source_indices, source_mask = _token_indices(source_bounds)
        sources = {key: index for index, key in enumerate(_rows_and_numbers(batch.source_documents, source_bounds))}
        # Padding may belong to a document without a source: it has weight 0, and takes any.
        order = [sources.get(key, 0) for key in _rows_and_numbers(batch.documents, bounds)]
        source = batch.source.flatten()[source_indices][order]
        inputs = {"input_ids": source, "attention_mask": source_mask[order].long(), "decoder_input_ids": tokens}
    return call(inputs)[mask].view(*batch.tokens.shape, -1)


def _document_bounds(documents: Tensor) -> Tensor:
    """The index, in the flattened rows, of each document's first token, and the number of all tokens."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = torch.tensor([documents.numel()], device=documents.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end])


def _token_indices(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """[documents, length]: the index of each token in the flattened rows, and whether it is one or padding."""
    firsts, lengths = bounds[:-1].unsqueeze(1), bounds.diff()
    offsets = torch.arange(int(lengths.max()), device=bounds.device)
    mask = offsets < lengths.unsqueeze(1)
    return (firsts + offsets).where(mask, firsts), mask


def _rows_and_numbers(documents: Tensor, bounds: Tensor) -> list[tuple[int, int]]:
    """The row and the number of each document."""
    firsts = bounds[:-1]
    rows = firsts // documents.shape[1]
    return list(zip(rows.tolist(), documents.flatten()[firsts].tolist(), strict=True))


# --- a try with few tokens ----------------------------------------------------------------------------------

_PROBE_LENGTHS = (3, 4, 2)


def separates_documents(
    module: nn.Module, single: Callable[[Batch], Tensor], packed: Callable[[Batch], Tensor], *, vocab_size: int | None
) -> bool:
    """Whether `packed` gives documents of one row the logits that `single` gives each of them, tried on few tokens."""
    device, was_training = next(module.parameters()).device, module.training
    tokens = torch.arange(2, 2 + 2 * sum(_PROBE_LENGTHS), device=device).split(sum(_PROBE_LENGTHS))
    if vocab_size is not None:  # an index out of range would be fatal on a GPU
        tokens = tuple(part % vocab_size for part in tokens)
    numbers = torch.arange(len(_PROBE_LENGTHS), device=device)
    documents = numbers.repeat_interleave(torch.tensor(_PROBE_LENGTHS, device=device)).unsqueeze(0)
    positions = torch.cat([torch.arange(length, device=device) for length in _PROBE_LENGTHS]).unsqueeze(0)
    targets, sources = tokens[0].unsqueeze(0), tokens[1].unsqueeze(0)
    row = Batch(targets, targets, targets, numbers[:1], positions, documents, sources, documents)
    parts = zip(targets.split(_PROBE_LENGTHS, 1), sources.split(_PROBE_LENGTHS, 1), strict=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            expected = torch.cat([single(Batch(t, t, t, numbers[:1], source=s)) for t, s in parts], 1)
            logits = gather_whole_logits(packed(row), module)
            expected = gather_whole_logits(expected, module)
    except (RuntimeError, ValueError, TypeError, IndexError, InputError):
        return False  # the model does not take what it would be given
    finally:
        module.train(was_training)
    largest = expected.abs().max().item()
    return logits.shape == expected.shape and (logits - expected).abs().max().item() <= 1e-4 * largest
