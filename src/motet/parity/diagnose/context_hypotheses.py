"""Hypotheses about ranks that share each row: tokens from other places, other positions, and attention with other keys.

Places and positions are read from the records. A mistake in attention is made on one device on purpose, in the call of
attention before the first tensor that differs, to see whether it gives the tensor that a rank has recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.errors import InputError
from motet.models.attention_seams import AttentionSeams
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import CONTEXT_DIMENSION
from motet.parity.compare.align_with_reference import format_numbered
from motet.parity.compare.tensor_differences import relative_distance
from motet.parity.diagnose.attention_mistakes import (
    AttentionMistake,
    MistakenAttention,
    PossibleMistakes,
    places_of,
)
from motet.parity.diagnose.mismatch_evidence import LocatedDifference, MismatchEvidence, is_equal_up_to_rounding
from motet.parity.diagnose.tensor_hypotheses import Hypothesis
from motet.parity.diagnose.tolerances import tolerances
from motet.parity.record.activation_parts import WHOLE_MODEL, cut_part, module_of
from motet.parity.record.argument_tensors import named_float_tensors
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    RecordedTensor,
    TensorKey,
    sketch_rows,
)

TABLE_TOLERANCE = 1e-9


# --- tokens of other places ----------------------------------------------------------------------------


class _TokensOfRank(NamedTuple):
    """A tensor that a rank recorded for its part of each row, and the complete rows of one device."""

    rank: int  # Among the ranks that share each row
    value: Tensor
    complete: Tensor  # It differs from the value along the dimension of tokens alone
    dim: int
    partition: ContextPartition

    @property
    def places(self) -> Tensor:
        return places_of(self.partition, self.rank)


def _tokens_of_rank(e: MismatchEvidence) -> _TokensOfRank | None:
    """The worst part; None if it is no part of rows, or a sketch."""
    located, planned, record = e.source, e.source.recompute.planned, e.source.worst_pair.record
    tokens = planned.activations.tokens if planned is not None else None
    placement = located.reference.row_placements.get(located.key)
    is_known = record is not None and record.part is not None and not record.is_sketched
    if tokens is None or record is None or e.rank is None or not is_known or record.part is None:
        return None
    rows = located.tensor.rows
    complete = located.tensor.value
    if record.rows != rows:
        if placement is None or placement.how != "rows":
            return None
        complete = placement.select(complete, len(rows), [rows.index(row) for row in record.rows])
    rank, part = located.recompute.layout.dims.coordinates(e.rank)[CONTEXT_DIMENSION], record.part
    spans = tokens.partition.spans(rank)
    dim = next((n for n, along in enumerate(part.spans) if along == spans), None)
    if dim is None or part.shape[dim] != tokens.row_tokens or complete.shape != part.shape or part.padding:
        return None
    others = replace(part, spans=(*part.spans[:dim], ((0, tokens.row_tokens),), *part.spans[dim + 1 :]))
    return _TokensOfRank(rank, record.value, cut_part(complete, others), dim, tokens.partition)


def has_tokens_of_other_places(e: MismatchEvidence) -> str:
    """The part of a tensor is right for other places of the row."""
    if (tokens := _tokens_of_rank(e)) is None:
        return ""
    for words, places in _other_places(tokens):
        other = tokens.complete.index_select(tokens.dim, places).double()
        if torch.equal(places, tokens.places) or not is_equal_up_to_rounding(tokens.value.double(), other):
            continue
        right = tokens.complete.index_select(tokens.dim, tokens.places).double()
        return "" if is_equal_up_to_rounding(right, other) else f"it is that of {words}{_where(e)}"
    return ""


def _other_places(tokens: _TokensOfRank) -> Iterator[tuple[str, Tensor]]:
    """Places in the row that the tokens of a rank may have by mistake."""
    partition, here = tokens.partition, tokens.places
    spans = [torch.arange(*span) for span in partition.spans(tokens.rank)]
    if len(spans) > 1:
        yield "this part with its head and its tail exchanged", torch.cat(spans[::-1])
    for rank in range(partition.ranks):
        if partition.length(rank) == len(here):
            yield f"the part of rank {rank} of the ranks with the same rows", places_of(partition, rank)
    yield f"the first {len(here)} tokens of the row", torch.arange(len(here))


def has_other_positions(e: MismatchEvidence) -> str:
    """A tensor that depends on positions alone is right for other positions."""
    if (tokens := _tokens_of_rank(e)) is None or (positions := _positions_of_rows(e, tokens)) is None:
        return ""
    decoded = _decode(tokens, positions)
    if decoded is None:
        return ""
    expected = positions[:, tokens.places]
    if torch.equal(decoded, expected):
        return ""
    for words, other in _other_positions(tokens, positions):
        if torch.equal(decoded, other.expand_as(decoded)):
            return f"{words}{_where(e)}"
    return ""


def _positions_of_rows(e: MismatchEvidence, tokens: _TokensOfRank) -> Tensor | None:
    """[rows, tokens] of complete rows."""
    record, located = e.source.worst_pair.record, e.source
    if (tensor := located.reference.tensors.get(TensorKey("sample", "positions"))) is not None and record is not None:
        return tensor.value[[tensor.rows.index(row) for row in record.rows]]
    return torch.arange(tokens.partition.tokens).expand(tokens.complete.shape[0] if tokens.dim else 1, -1)


def _decode(tokens: _TokensOfRank, positions: Tensor) -> Tensor | None:
    """The positions [rows, tokens] that a tensor has, if it is a function of positions."""
    complete, value = tokens.complete.double(), tokens.value.double()
    if tokens.dim == 0:  # The same for all rows
        complete, value = complete[None], value[None]
    if tokens.dim > 1 or complete.shape[:2] != positions.shape:
        return None
    complete, value = complete.reshape(positions.numel(), -1), value.reshape(*value.shape[:2], -1)
    known = positions.flatten()
    table = complete.new_zeros(int(known.max()) + 1, complete.shape[1]).index_copy(0, known, complete)
    is_known = torch.zeros(len(table), dtype=torch.bool).index_fill(0, known, True)
    size = float(complete.abs().max())
    if relative_distance(table[known], complete) > TABLE_TOLERANCE:
        return None
    distances = torch.cdist(value.flatten(0, 1), table, p=float("inf")).masked_fill(~is_known, float("inf"))
    nearest = distances.min(1)
    return nearest.indices.view(value.shape[:2]) if float(nearest.values.max()) <= TABLE_TOLERANCE * size else None


def _other_positions(tokens: _TokensOfRank, positions: Tensor) -> Iterator[tuple[str, Tensor]]:
    partition, count = tokens.partition, len(tokens.places)
    yield "positions begin at 0 in the part of a rank", torch.arange(count)
    restarted = positions.clone()
    for first, stop in partition.spans(tokens.rank):
        here = positions[:, first:stop]
        is_first_document = (here - here[:, :1] == torch.arange(stop - first)).cumprod(1).bool()
        restarted[:, first:stop] = torch.where(is_first_document, here - here[:, :1], here)
    yield "positions begin at 0 again at each cut of the row", restarted[:, tokens.places]
    for words, places in _other_places(tokens):
        yield f"positions are those of {words}", positions[:, places]


# --- attention with a mistake ----------------------------------------------------------------------------


def has_mistaken_attention(e: MismatchEvidence) -> str:
    """One device gets the tensor of a rank when it makes a mistake in attention."""
    located, planned = e.source, e.source.recompute.planned
    tokens = planned.activations.tokens if planned is not None else None
    records = [(rank, record) for rank, record in located.records_by_key[located.key] if _is_run(record.rows)]
    if planned is None or tokens is None or not records:
        return ""
    layout = located.recompute.layout
    with located.recompute.restored_to(located.recompute.step):
        try:
            return _find_mistake(located, tokens.partition, records, layout=layout)
        except InputError:  # Attention of this model does not reach the core on one device
            return ""


def _is_run(rows: tuple[int, ...]) -> bool:
    return bool(rows) and rows == tuple(range(rows[0], rows[-1] + 1))


def _find_mistake(
    located: LocatedDifference,
    partition: ContextPartition,
    records: list[tuple[int, RecordedTensor]],
    *,
    layout: Layout,
) -> str:
    by_rows = {record.rows: AttentionRecompute(located, partition, record.rows) for _, record in records}
    right = {rows: each.value(None) for rows, each in by_rows.items()}
    if any(each.call_of_attention < 0 for each in by_rows.values()):
        return ""
    bound = located.difference.difference.bound
    distances = [_distance(located, each, right[each[1].rows]) for each in records]
    wrong = [each for each, distance in zip(records, distances, strict=True) if distance > bound]
    if not wrong:
        return ""
    worst = records[distances.index(max(distances))]
    mistakes = PossibleMistakes(partition, layout.context.head_ranks)
    candidates = mistakes.output_mistakes() if located.key.kind == "activation" else mistakes.gradient_mistakes()
    for mistake in candidates:
        values = {rows: each.value(mistake) for rows, each in by_rows.items() if rows == worst[1].rows}
        if not _is_value(located, worst, values):
            continue
        values |= {rows: each.value(mistake) for rows, each in by_rows.items() if rows not in values}
        ranks = sorted({each[0] for each in wrong if _is_value(located, each, values)})
        is_part = len(ranks) < len({rank for rank, _ in records})
        return mistake.words + (f", on {format_numbered('rank', ranks)} alone" if is_part else "")
    return ""


def _is_value(
    located: LocatedDifference, record: tuple[int, RecordedTensor], values: dict[tuple[int, ...], Tensor | None]
) -> bool:
    value = values[record[1].rows]
    return value is not None and _distance(located, record, value) < tolerances().fit


def _distance(located: LocatedDifference, rank_record: tuple[int, RecordedTensor], complete: Tensor | None) -> float:
    """The distance of what a rank recorded from its part of complete rows; infinite if they do not pair up."""
    (rank, record), planned = rank_record, located.recompute.planned
    if complete is None or planned is None:
        return float("inf")
    shape = tuple(complete.shape)
    part = planned.activations.spec(record.name, rank, shape, rows=len(record.rows))
    expected = complete if part is None else cut_part(complete, part)
    expected = sketch_rows(located.key, expected, part if part and part.local_shape != shape else None)
    if expected.shape != record.value.shape:
        return float("inf")
    return relative_distance(record.value, expected)


@dataclass(frozen=True)
class AttentionRecompute:
    """The tensor of some rows, computed on one device with mistakes in attention."""

    located: LocatedDifference
    partition: ContextPartition
    rows: tuple[int, ...]

    def value(self, mistake: AttentionMistake | None) -> Tensor | None:
        """The tensor after a mistake; None if it cannot happen here."""
        at_call = -1 if mistake is None else self.call_of_attention
        attention = MistakenAttention(self.partition, self._documents, mistake, at_call)
        value = self._compute(attention).value
        return value if attention.is_possible else None

    @cached_property
    def call_of_attention(self) -> int:
        """The last call of attention before an output, or the first call after it for a gradient; -1: there is none."""
        attention = MistakenAttention(self.partition, self._documents)
        before = self._compute(attention).calls_before
        if self.located.key.kind == "activation":
            return before - 1
        return before if before < attention.calls else -1

    @property
    def _documents(self) -> Tensor | None:
        tensor = self.located.reference.tensors.get(TensorKey("sample", "documents"))
        return None if tensor is None else tensor.value[[tensor.rows.index(row) for row in self.rows]]

    def _compute(self, attention: MistakenAttention) -> "_WatchedOutput":
        recompute, watched = self.located.recompute, _WatchedOutput(self.located.key, attention)
        hook = recompute.module.get_submodule(module_of(watched.key.name)).register_forward_hook(watched.on_output)
        rows = range(self.rows[0], self.rows[-1] + 1)
        try:
            with AttentionSeams(recompute.module).exchanging(attention):
                recompute.run_rows(rows, with_backward=watched.key.kind == "activation gradient")
        finally:
            hook.remove()
        return watched


@dataclass
class _WatchedOutput:
    """An output of a module by its name in records, or its gradient."""

    key: TensorKey
    attention: MistakenAttention
    value: Tensor | None = None
    calls_before: int = -1  # Calls of attention in the forward, until the module had computed it
    labels: list[str] = field(default_factory=list)

    def on_output(self, module: object, inputs: object, output: object) -> None:
        """A forward hook of the module."""
        for label, tensor in named_float_tensors(output, module_of(self.key.name) or WHOLE_MODEL):
            self.labels.append(label)
            call = self.labels.count(label)
            if self.key.name == (label if call == 1 else f"{label} (call {call})"):
                self.calls_before = self.attention.calls
                if self.key.kind == "activation":
                    self.value = tensor.detach()
                else:
                    tensor.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> None:
        self.value = gradient.detach()


def _where(e: MismatchEvidence) -> str:
    """The ranks that differ, if others do not."""
    return e.source.location_text()


CONTEXT_HYPOTHESES: tuple[Hypothesis, ...] = (
    (("sample", "activation"), has_other_positions),
    (("sample", "random mask", "activation"), has_tokens_of_other_places),
    (ACTIVATION_KINDS, has_mistaken_attention),
)
