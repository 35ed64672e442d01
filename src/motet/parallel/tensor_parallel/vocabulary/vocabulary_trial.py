"""Runs of a module as the whole and as each of its shards of a vocabulary, one after another, and their comparison.

A shard goes on with the whole's vectors after a lookup, and reads the whole's input at the head, as if ranks
communicated. So every difference is found where it arises.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, DimensionSplit
from motet.parallel.tensor_parallel.proof_values import add_to_part, local_part, local_values
from motet.parallel.tensor_parallel.shard_comparison import sum_of
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import shard_embedding
from motet.parallel.tensor_parallel.vocabulary.vocabulary_layers import VocabularyLayer, differs


class VocabularyMismatchError(Exception):
    """Shards do not add up to the whole, because of some layers."""

    def __init__(self, text: str, *layers: VocabularyLayer | None) -> None:
        super().__init__(text)
        self.layers = [layer for layer in layers if layer is not None]


class VocabularyTrial:
    """A module with its forwards, whose layers are split in trial runs."""

    def __init__(
        self, module: nn.Module, forwards: Sequence[Callable[[], Tensor]], degree: int, *, gathers_logits: bool
    ) -> None:
        self.module, self.forwards, self.degree, self.gathers_logits = module, forwards, degree, gathers_logits
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.names = {alias: names[p] for alias, p in module.named_parameters(remove_duplicate=False)}

    def compare(self, layers: Sequence[VocabularyLayer]) -> set[str]:
        """The names of whole parameters whose gradients are partial sums; raises VocabularyMismatchError."""
        partial_names, head = set[str](), next((layer for layer in layers if layer.is_head), None)
        lookups = [layer for layer in layers if not layer.is_head]
        for forward in (*self.forwards, *map(self._border_lookup, lookups)):
            whole_run = _VocabularyRun(self, layers)
            whole_run.run(forward)
            runs = [_VocabularyRun(self, layers, rank=rank, whole_run=whole_run) for rank in range(self.degree)]
            for run in runs:
                run.run(forward)
            self._compare_lookups(runs, whole_run)
            if head is not None and whole_run.hidden is not None:
                partial_names |= self._compare_gradients(runs, whole_run, head)
        return partial_names

    def _border_lookup(self, layer: VocabularyLayer) -> Callable[[], Tensor]:
        """A lookup of the first and the last entry of each rank, and of the entry that stands for padding."""
        table: Any = self.module.get_submodule(layer.name)
        bounds = [self.bounds(layer, rank) for rank in range(self.degree)]
        ids = [bound for start, stop in bounds if start < stop for bound in (start, stop - 1)]
        ids += [0 if getattr(table, "padding_idx", None) is None else table.padding_idx % layer.entries]
        return lambda: cast(Tensor, table(torch.tensor([ids])))

    def bounds(self, layer: VocabularyLayer, rank: int) -> tuple[int, int]:
        """The first entry of a rank, and the end of its entries."""
        split = next(iter(layer.splits.values()))
        return split.local_spans(layer.entries, ranks=self.degree, index=rank)[0][0]

    def local_tensors(self, layers: Sequence[VocabularyLayer], rank: int) -> dict[str, Tensor]:
        """The split tensors of a rank by all of their names."""
        splits = {name: split for layer in layers for name, split in layer.splits.items()}
        tensors = {
            alias: (self.module.get_parameter(name), splits[name])
            for alias, name in self.names.items()
            if name in splits
        }
        return {n: local_part(p.detach(), split, ranks=self.degree, index=rank) for n, (p, split) in tensors.items()}

    def _compare_lookups(self, runs: Sequence["_VocabularyRun"], whole_run: "_VocabularyRun") -> None:
        for index, (layer, vectors, gradient) in enumerate(whole_run.lookups):
            if any(len(run.lookups) <= index for run in runs):
                raise VocabularyMismatchError("is not called on every shard", layer)
            total = torch.stack([run.lookups[index][1] for run in runs]).sum(0)
            if differs(total, vectors):
                raise VocabularyMismatchError(
                    "the vectors of the shards do not add up to the vectors of the table", layer
                )
            self._compare_parts(layer, layer.dims[0][0], [run.lookups[index][2] for run in runs], gradient=gradient)

    def _compare_gradients(
        self, runs: Sequence["_VocabularyRun"], whole_run: "_VocabularyRun", head: VocabularyLayer
    ) -> set[str]:
        partial_names = set[str]()
        if differs(sum_of(run.gradients[""] for run in runs), whole_run.gradients[""]):
            raise VocabularyMismatchError("the gradients of its input do not add up over shards", head)
        for name, gradient in whole_run.gradients.items():
            parts = [run.gradients.get(name, torch.zeros_like(gradient)) for run in runs]
            if name in head.splits:
                self._compare_parts(head, name, parts, gradient=gradient)
            elif name and any(differs(part, gradient) for part in parts):
                if name not in head.whole_tensors or differs(sum_of(parts), gradient):
                    raise VocabularyMismatchError(
                        f"the gradient of {name}, which comes after it, is another on shards", head
                    )
                partial_names.add(name)
        return partial_names

    def _compare_parts(self, layer: VocabularyLayer, name: str, parts: Sequence[Tensor], *, gradient: Tensor) -> None:
        total, is_padded = torch.zeros_like(gradient), False
        for rank, part in enumerate(parts):
            is_padded |= bool(add_to_part(total, part, layer.splits[name], ranks=self.degree, index=rank).any())
        if is_padded or differs(total, gradient):
            what = "has a gradient in its padding" if is_padded else "does not get the gradient of the whole"
            raise VocabularyMismatchError(f"{name} {what}", layer)


class _VocabularyRun:
    """A forward of the whole, or of the shard of a rank."""

    def __init__(
        self,
        trial: VocabularyTrial,
        layers: Sequence[VocabularyLayer],
        *,
        rank: int | None = None,
        whole_run: "_VocabularyRun | None" = None,
    ) -> None:
        self.trial, self.layers, self.rank, self.whole_run = trial, layers, rank, whole_run
        self.lookups: list[tuple[VocabularyLayer, Tensor, Tensor]] = []  # Vectors, and the gradient of the table
        self.hidden: Tensor | None = None  # The input of the head, where the graph begins
        self.scores = self.result = torch.empty(0)  # The output of the head, and of the forward
        self.gradients: dict[str, Tensor] = {}  # Of `hidden` by an empty name, and of parameters by theirs

    def run(self, forward: Callable[[], Tensor]) -> None:
        """Run the forward, and compute gradients from its result back to the head's input."""
        module, local = self.trial.module, {}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
            if self.rank is not None:
                local = self.trial.local_tensors(self.layers, self.rank)
            stack.enter_context(local_values(module, local, ()))
            for layer in self.layers:
                self._hook(layer, module.get_submodule(layer.name), stack)
            try:
                self.result = forward()
                self._check_result()
                if self.hidden is not None:
                    self._differentiate(self.hidden)
            except VocabularyMismatchError:
                raise
            except Exception as error:  # whatever the module runs into with other shapes
                if self.rank is None:
                    raise
                text = f"a shard cannot run: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise VocabularyMismatchError(text, *self._suspects) from error

    @property
    def _head(self) -> VocabularyLayer | None:
        return next((layer for layer in self.layers if layer.is_head), None)

    @property
    def _suspects(self) -> Sequence[VocabularyLayer]:
        """Layers on which what ran last depends: the input of the head is that of the whole."""
        lookups = [layer for layer in self.layers if not layer.is_head]
        return lookups if self.hidden is None else [layer for layer in self.layers if layer.is_head]

    def _hook(self, layer: VocabularyLayer, part: nn.Module, stack: ExitStack) -> None:
        if layer.is_head:
            stack.callback(part.register_forward_pre_hook(self._enter_head).remove)
            stack.callback(part.register_forward_hook(self._leave_head).remove)
            return
        if self.rank is not None:
            start, stop = self.trial.bounds(layer, self.rank)
            stack.callback(shard_embedding(part, range(start, stop)))
        leave = part.register_forward_hook(lambda table, _, output: self._leave_lookup(layer, table, output))
        stack.callback(leave.remove)

    def _leave_lookup(self, layer: VocabularyLayer, table: nn.Module, output: Tensor) -> Tensor:
        index = len(self.lookups)
        vectors = output.detach() if self.whole_run is None else self.whole_run.lookups[index][1]
        (weight,) = (p for p in table.parameters(recurse=False) if p.ndim == 2)
        gradient = torch.zeros_like(weight)  # Of a lookup that is not trained
        if output.requires_grad:
            (gradient,) = torch.autograd.grad(output, weight, _random_like(output, index))
        self.lookups.append((layer, output.detach(), gradient))
        return vectors.clone()

    def _enter_head(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        head, whole_run = self._head, self.whole_run
        if self.hidden is not None:
            raise VocabularyMismatchError("is called several times in a forward", head)
        hidden = args[0].detach()
        if whole_run is not None and whole_run.hidden is not None:
            if differs(hidden, whole_run.hidden.detach()):
                raise VocabularyMismatchError("something besides lookups reads the table", *self._suspects)
            hidden = whole_run.hidden.detach()
        self.hidden = hidden.clone().requires_grad_()
        return (self.hidden, *args[1:])

    def _leave_head(self, _: nn.Module, args: object, output: Tensor) -> Tensor | None:
        self.scores, head, whole_run = output.detach(), self._head, self.whole_run
        if not self.trial.gathers_logits or whole_run is None or self.rank is None or head is None:
            return None
        start, stop = self.trial.bounds(head, self.rank)
        scores = whole_run.scores
        if differs(self.scores[..., : stop - start], scores[..., start:stop]):
            raise VocabularyMismatchError("its output on a shard is no part of its output", head)
        return torch.cat([scores[..., :start], output[..., : stop - start], scores[..., stop:]], -1)

    def _check_result(self) -> None:
        if self.whole_run is None or self.rank is None:
            return
        expected, head, result = self.whole_run.result, self._head, self.result
        if head is not None and self.hidden is not None and not self.trial.gathers_logits:
            start, stop = self.trial.bounds(head, self.rank)
            if result.shape[-1] != -(-head.entries // self.trial.degree):
                raise VocabularyMismatchError(f"the logits of a shard have shape {list(result.shape)}", head)
            result, expected = result[..., : stop - start], expected[..., start:stop]
        if differs(result, expected):
            what = "the logits depend on the vocabulary of other ranks, or on something that a shard changes"
            raise VocabularyMismatchError(what, *self._suspects)

    def _differentiate(self, hidden: Tensor) -> None:
        trial, whole_run = self.trial, self.whole_run or self
        if not self.result.requires_grad:
            raise VocabularyMismatchError("what comes after it has no gradient", self._head)
        parameters = trial.module.named_parameters(remove_duplicate=False)
        named = {p: trial.names[alias] for alias, p in parameters if p.requires_grad}  # Not in most of many blocks
        gradient = _random_like(whole_run.result, 0)
        if self.rank is not None and not trial.gathers_logits:
            last = DimensionSplit(gradient.ndim - 1, TENSOR_DIMENSION)
            gradient = local_part(gradient, last, ranks=trial.degree, index=self.rank)
        computed = torch.autograd.grad(self.result, [hidden, *named], gradient, allow_unused=True)
        for name, value in zip(["", *named.values()], computed, strict=True):
            if value is not None:
                self.gradients[name] = self.gradients.get(name, torch.zeros_like(value)) + value


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(seed))
