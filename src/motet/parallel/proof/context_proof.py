"""Proof by running that the tokens of a model meet in attention alone, so that ranks can have parts of a row.

The seams of attention propose, and runs decide. With its attention handed to the core, the whole model must compute the
same as before. Then the whole runs with its graph cut at each call of attention, and so does each part: it goes on with
the output of the whole at its places. Queries, keys, values, losses and gradients of the parts must be those of the
whole. A part that agrees with the whole at these cuts needs nothing of other tokens but their keys and values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError, check_input
from motet.models.arch.attention_core import ScoreOptions, attend
from motet.models.arch.attention_mask import AttentionMask, AttentionTokens
from motet.models.attention_seams import AttentionSeams
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode, TokenPart, token_part
from motet.models.user_module import named_blocks
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.context_partition import ContextPartition
from motet.parallel.model_sharding import CONTEXT_DIMENSION, BoundaryComm
from motet.parallel.proof.comparison import (
    ProofMismatchError,
    check_close,
    distance,
    gradient_comparisons,
    is_close,
    sum_of,
)
from motet.parallel.proof.module_calls import CallObserver, ModuleCall, record_calls
from motet.parallel.proof.part_proof import (
    PartProposal,
    PartRun,
    compare_border_gradients,
    compare_results,
    compare_values,
    explain_failing_part,
)
from motet.parallel.proof.proof_values import random_values


@dataclass(frozen=True)
class ContextExample:
    """Whole rows, and a cut of them."""

    batch: Batch
    partition: ContextPartition


def prove_context(
    module: nn.Module,
    forward: Callable[[Batch], Any],
    examples: Sequence[ContextExample],
    *,
    ranks: int,
    prepare: Callable[[], object] | None = None,
) -> tuple[AttentionCall, ...]:
    """The calls of attention in a forward of a module whose tokens meet nowhere else; other modules are refused.

    `forward` gives the sum of the losses of a batch. The proof cuts rows as the examples say, whatever the number of
    `ranks`: a token does not see how many others are elsewhere.
    """
    kind = type(module).__name__
    check_input(
        all(example.batch.source is None for example in examples),
        f"layout.cp = {ranks} splits the tokens of one sequence, and {kind} is an encoder-decoder, which reads two; "
        "leave layout.cp out",
    )
    try:
        with random_values(module):
            if prepare is not None:
                with torch.no_grad():
                    prepare()
            proof = _ContextProof(module, forward)
            calls = [proof.check(example) for example in examples]
    except ProofMismatchError as error:
        raise InputError(
            f"layout.cp = {ranks} cannot split the rows of {kind}, whose tokens must meet in attention alone, as of "
            f"F.scaled_dot_product_attention: {error}; leave layout.cp out, or split layers by layout.tp or layout.pp"
        ) from error
    return calls[0]


class _RowAttention:
    """Attention of whole rows, in the core."""

    def __init__(self, documents: Tensor | None) -> None:
        self._tokens = AttentionTokens(None, documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """Attention to the keys that a mask and the documents of rows show."""
        if mask.bias is not None:
            raise ProofMismatchError("its attention adds a learned bias to each pair of tokens")
        rows = AttentionMask(self._tokens, self._tokens, causal=mask.causal, window=mask.window)
        return attend(q, k, v, mask=rows, options=options)


_QUERIES, _KEYS, _VALUES = (
    BoundaryComm("", "input", noun, "gather", CONTEXT_DIMENSION, 2) for noun in ("queries", "keys", "values")
)
_OUTPUT = BoundaryComm("", "output", "attention", "split", CONTEXT_DIMENSION, 2)


class _ContextRun(PartRun):
    """A run of the whole, or of the part with the tokens at some places, which is cut at each call of attention."""

    def __init__(
        self, module: nn.Module, attention: _RowAttention, places: Tensor | None, *, reference: "_ContextRun | None"
    ) -> None:
        modules, proposal = dict(module.named_modules()), PartProposal((), adds_results=True)
        super().__init__(modules, proposal, ranks=1, rank=None if places is None else 0, reference=reference)
        self._attention, self._token_places, self._whole_run = attention, places, reference
        self._outputs_of_attention, self._options = list[Tensor](), list[tuple[object, ...]]()
        self._blocks, self.attention_calls = list(named_blocks(module)), list[AttentionCall]()

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of this part."""
        return x if self._token_places is None else x.index_select(dim, self._token_places)

    def arrange(self, x: Tensor, dim: int) -> Tensor:
        """The same tensor: the whole has its tokens in the order of their places, and so have parts."""
        return x

    def without_padding(self, part: Tensor, expected: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The part, which has no padding, and the tokens of the whole with which it is compared."""
        return part, self.piece(expected, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """The output of the whole for the tokens of this part, where the graph begins again."""
        name = self.running[-1] if self.running else ""
        for comm, x in ((_QUERIES, q), (_KEYS, k), (_VALUES, v)):
            self.communicate(comm, name, x)
        index = len(self.attention_calls)
        self.attention_calls.append(describe_call(name, (q, k, v), mask, blocks=self._blocks))
        self._options.append((mask.causal, mask.window, options.scale, options.softcap, options.dropout))
        if self._whole_run is None:
            # An exchange draws the dropout of probabilities itself
            undropped = ScoreOptions(options.scale, options.softcap, options.sinks)
            with torch.no_grad():
                self._outputs_of_attention.append(self._attention.attend(q, k, v, mask=mask, options=undropped))
        elif self._options[index] != self._whole_run._options[index]:
            raise ProofMismatchError(f"{name} attends by another mask or scale on a part", module=name)
        outputs = (self._whole_run or self)._outputs_of_attention
        return self.communicate(_OUTPUT, name, outputs[index].requires_grad_())


def describe_call(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], mask: AttentionMask, *, blocks: Sequence[str]
) -> AttentionCall:
    """The sizes and the mask of a call of attention by a module; `blocks` are the names of the model's blocks."""
    q, k, v = tensors
    block = next((i for i, each in enumerate(blocks) if name == each or name.startswith(f"{each}.")), None)
    sizes = {"query_heads": q.shape[1], "key_heads": k.shape[1], "key_dim": k.shape[3], "value_dim": v.shape[3]}
    return AttentionCall(name, **sizes, causal=mask.causal, window=mask.window, block=block)


class AttentionObserver(CallObserver):
    """An exchange that keeps the calls of attention, and computes nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(dict(module.named_modules()))
        self._module, self._blocks = module, list(named_blocks(module))
        self.attention_calls = list[AttentionCall]()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Inside, the module's attention is observed."""
        with self.hooked(), AttentionSeams(self._module).exchanging(self):
            yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        """An output without values."""
        name = self.running[-1] if self.running else ""
        self.attention_calls.append(describe_call(name, (q, k, v), mask, blocks=self._blocks))
        return q.new_empty(*q.shape[:3], v.shape[3])


@dataclass
class _ContextProof:
    """A module with random values in float64, and its loss."""

    module: nn.Module
    forward: Callable[[Batch], Any]

    def __post_init__(self) -> None:
        self._modules, self._seams = dict(self.module.named_modules()), AttentionSeams(self.module)
        self._dropout = LayoutInvariantDropoutMode(0, self.module)

    def check(self, example: ContextExample) -> tuple[AttentionCall, ...]:
        """The calls of attention; raises ProofMismatchError."""
        self._compare_with_own(example.batch)
        run, rank = partial(self._run, example), 0
        reference, runs = run(), list[_ContextRun]()
        try:
            for rank in range(example.partition.ranks):
                runs.append(run(rank, reference=reference))
                compare_values(runs[-1:], reference)
            compare_results(runs, reference)
        except ProofMismatchError as mismatch:
            calls = self._calls(run), self._calls(partial(run, rank, reference=reference))
            places = example.batch.at_places(example.partition.spans(rank)).places
            first = _first_difference(*calls, partial(_at_places, batch=example.batch, places=places))
            raise self._named(first, "for a part of the tokens than for whole rows") or mismatch from mismatch
        compare_border_gradients(runs, reference)
        self._compare_gradients(runs, reference)
        return tuple(reference.attention_calls)

    def _compare_gradients(self, runs: Sequence[PartRun], reference: PartRun) -> None:
        """Compare the sums of the gradients of runs with those of the whole."""
        expected = {name: grad for name, grad in reference.gradients.items() if isinstance(name, str)}
        for each in gradient_comparisons(self.module, expected):
            partial_sums = [run.gradients[each.name] for run in runs if each.name in run.gradients]
            problem = f"the gradients of {each.name} are not those of whole rows"
            each.check(sum_of(partial_sums) if partial_sums else None, problem)

    def _attention(self, batch: Batch) -> _RowAttention:
        return _RowAttention(batch.documents if self._seams.separate_documents else None)

    def _compare_with_own(self, batch: Batch) -> None:
        """Compare the model with itself when its attention goes to the core."""

        def run(is_handed: bool) -> PartRun:
            result = PartRun(self._modules, PartProposal(()), ranks=1)
            seams = self._seams.exchanging(self._attention(batch)) if is_handed else nullcontext()
            self._differentiate(result, partial(self.forward, batch), batch, inside=seams)
            return result

        expected = run(False)
        try:
            handed = run(True)
            for result, own_result in zip(handed.results, expected.results, strict=True):
                check_close(result, own_result, "with motet's attention the loss differs")
        except ProofMismatchError as mismatch:
            calls = self._calls(partial(run, False)), self._calls(partial(run, True))
            first = _first_difference(*calls, lambda own_value, x: own_value if own_value.shape == x.shape else None)
            raise self._named(first, "with motet's attention than with its own") or mismatch from mismatch
        self._compare_gradients([handed], expected)

    def _run(
        self, example: ContextExample, rank: int | None = None, *, reference: _ContextRun | None = None
    ) -> _ContextRun:
        """The run of the whole, or of the part of a rank."""
        batch, part = example.batch, None
        if rank is not None:
            batch = batch.at_places(example.partition.spans(rank))
            part = TokenPart(example.partition.tokens, example.partition.spans(rank))
        run = _ContextRun(self.module, self._attention(example.batch), batch.places, reference=reference)
        self._differentiate(run, partial(self.forward, batch), batch, inside=self._seams.exchanging(run), part=part)
        return run

    def _differentiate(
        self,
        run: PartRun,
        forward: Callable[[], Any],
        batch: Batch,
        *,
        inside: AbstractContextManager[object],
        part: TokenPart | None = None,
    ) -> None:
        def forward_inside() -> Any:
            with inside:
                return forward()

        noun, token = "the model with motet's attention" if part is None else "a part of a row", token_part.set(part)
        with explain_failing_part(run, noun), self._dropout.for_rows(0, batch.rows):
            try:
                run.run(forward_inside, lambda: dict(self.module.named_parameters()))
            except InputError as error:  # A seam refuses the call of a module
                name = run.running[-1] if run.running else ""
                module = f"{self._noun(name)}: " if name else ""
                raise ProofMismatchError(f"{module}{error}", module=name) from error
            finally:
                token_part.reset(token)

    # --- the module that differs ---

    def _calls(self, run: Callable[[], object]) -> Mapping[str, Sequence[ModuleCall]]:
        """The calls of modules in a run, as far as it comes."""
        with record_calls(self._modules) as calls, suppress(ProofMismatchError):
            run()
        return calls

    def _named(self, first: "_Difference | None", where: str) -> ProofMismatchError | None:
        """A mismatch that names the module of the first difference."""
        if first is None:
            return None
        values = "indices, such as positions that its caller counts," if first.has_indices else "values"
        verb = "returns" if first.is_output else "gets"
        text = f"{self._noun(first.module)} {verb} other {values} {where}"
        return ProofMismatchError(text, module=first.module, distance=None if first.has_indices else first.distance)

    def _noun(self, name: str) -> str:
        kind = type(self._modules[name]).__name__
        return f"{name} ({kind})" if name else f"the {kind}"


@dataclass(frozen=True)
class _Difference:
    """The first tensor in which two runs differ."""

    module: str
    is_output: bool  # Whether the module returns it, or gets it
    has_indices: bool
    distance: float


def _first_difference(
    expected: Mapping[str, Sequence[ModuleCall]],
    calls: Mapping[str, Sequence[ModuleCall]],
    piece: Callable[[Tensor, Tensor], Tensor | None],
) -> _Difference | None:
    """The first tensor that differs from the piece of that of the whole, where this is known, in the order of calls."""
    events: list[tuple[int, str, bool, ModuleCall, ModuleCall]] = []
    for name, of in calls.items():
        for call, whole_call in zip(of, expected.get(name, ()), strict=False):
            events.append((call.place[0], name, False, call, whole_call))
            if call.place[1] >= 0:
                events.append((call.place[1], name, True, call, whole_call))
    for _, name, is_output, call, whole_call in sorted(events, key=lambda event: event[0]):
        values, whole_values = (each.left if is_output else each.entered for each in (call, whole_call))
        for path, x in values.items():
            whole_piece = piece(whole_values[path], x) if path in whole_values else None
            if whole_piece is not None and not is_close(x, whole_piece, nan_is_equal=True):
                return _Difference(name, is_output, not x.is_floating_point(), distance(x, whole_piece))
    return None


def _at_places(whole_value: Tensor, x: Tensor, *, batch: Batch, places: Tensor | None) -> Tensor | None:
    """The piece of a tensor of whole rows in the shape of that of a part; None where it is not known."""
    (rows, tokens), local = batch.tokens.shape, 0 if places is None else len(places)
    if places is None or whole_value.ndim != x.ndim:
        return None
    for dim, sizes in enumerate(zip(whole_value.shape, x.shape, strict=True)):
        if sizes == (tokens, local):
            whole_value = whole_value.index_select(dim, places)
        elif sizes == (rows * tokens, rows * local):
            whole_value = whole_value.unflatten(dim, (rows, tokens)).index_select(dim + 1, places).flatten(dim, dim + 1)
        elif sizes[0] != sizes[1]:
            return None
    return whole_value
