"""The balance of the experts of a model on one rank: hooks on its routers count loads and add terms to gradients.

Loads are integers. A token counts once for each of its experts, in the first forward of a row that has targets. The
sums over all ranks, which every rank has, become buffers and move the corrections, with the same bits everywhere.

The gradient of a term enters at the weights that a router gives, so the term needs no way to the loss: it may be on
another stage of a pipeline, and a recomputed block adds it once, like its other gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_reduce
from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.settings import BalanceSettings
from motet.models.torch_private import is_in_backward
from motet.parallel.context_parallel.context_partition import ContextSplit
from motet.parallel.data_parallel.communication.shard_replica_mesh import join_subgroup
from motet.parallel.model_sharding import CONTEXT_DIMENSION, TENSOR_DIMENSION
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.process.process_group import RankGroup
from motet.parallel.proof.module_calls import arguments_of, value_at, with_values
from motet.parallel.sync_groups import reports
from motet.train.balance.balanced_layers import BalancedLayer
from motet.train.balance.terms import RowTerms, entropies, row_counts


@dataclass(frozen=True)
class RoutedRows:
    """The rows of a micro-batch, for the routers that get their tokens."""

    targets: Tensor  # [R], the sum of the weights of each complete row; a row without targets does not count
    row_tokens: int  # Tokens of a complete row
    first_row: int  # The number of the first row in the global batch
    scale: float  # The gradient of the sum of losses


class LayerLoads(NamedTuple):
    """The routing of one layer in a step, on all ranks."""

    name: str
    loads: tuple[int, ...]  # Assignments to each expert, before any is dropped
    dropped: int  # Assignments that a limit dropped
    entropy: float  # The mean over tokens of the entropy of their scores, in nats

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean; 1 where no token counts."""
        return max(self.loads) * len(self.loads) / total if (total := sum(self.loads)) else 1.0


@dataclass(frozen=True)
class ExpertLoads:
    """The routing of all layers in a step, and the terms of its loss."""

    layers: tuple[LayerLoads, ...]
    loss_sum: float  # The sum of all terms; like losses it is divided by the targets


class _AddGradient(torch.autograd.Function):
    """Weights unchanged, whose backward adds the gradient of a term that is in no loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *term_and_scale: Any) -> Tensor:
        term, ctx.scale = term_and_scale
        ctx.dtype, ctx.device = term.dtype, term.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


class ExpertBalance:
    """The routers of a module on this rank."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[BalancedLayer],
        settings: BalanceSettings,
        *,
        group: RankGroup,
        dims: ParallelDims,
        context: ContextSplit,
        reproducible_rows: int | None = None,
    ) -> None:
        """`group` are the ranks that take a step together, of which all call this. Terms of the rows of a reproducible
        run are summed by row."""
        self.layers, self._settings, self._device = layers, settings, group.device
        self._tensor_ranks, self._context = dims.size(TENSOR_DIMENSION), context
        self._has_terms = settings.row_weight > 0 or settings.z_weight > 0
        place = dims.coordinates(group.rank)
        self._context_rank = place.get(CONTEXT_DIMENSION, 0)
        self._reports = {is_part: reports("loads of parts" if is_part else "loads", place, dims) for is_part in (0, 1)}
        over = (CONTEXT_DIMENSION, TENSOR_DIMENSION)
        needs_counts = settings.row_weight > 0
        self._row_groups = {
            is_part: join_subgroup(group, dims.groups(*names))
            for is_part, names in enumerate((over[:1], over))
            if needs_counts and dims.size(*names) > 1
        }
        self._routers = [module.get_submodule(each.layer.router) for each in layers]
        self._corrections = [None if each.correction is None else module.get_buffer(each.correction) for each in layers]
        for index, (each, router) in enumerate(zip(layers, self._routers, strict=True)):
            router.register_forward_hook(partial(self._on_router, index))
            experts = module.get_submodule(each.layer.experts)
            experts.register_forward_pre_hook(partial(self._on_experts, index), with_kwargs=True)
        self._row_slots = reproducible_rows or 1
        self._is_reproducible = reproducible_rows is not None
        self._rows: RoutedRows | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the loads of the step before."""
        count, floats = len(self.layers), partial(torch.zeros, dtype=torch.float64, device=self._device)
        self._loads = [torch.zeros(each.layer.count, dtype=torch.int64, device=self._device) for each in self.layers]
        self._dropped = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._entropies, self._terms = floats(count), floats(count, self._row_slots)

    def rows_of(self, batch: Batch, scale: float) -> RoutedRows:
        """The rows of a micro-batch as it was read, complete; `scale` is the gradient of the sum of losses."""
        targets = batch.weights.reshape(len(batch.rows), -1).sum(1, dtype=torch.float64)
        return RoutedRows(targets.to(self._device), batch.tokens.shape[1], int(batch.rows[0]), scale)

    @contextmanager
    def rows(self, rows: RoutedRows | None) -> Iterator[None]:
        """A context for the forward and the backward of a micro-batch; None for one that does not contribute."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    # --- calls of routers and experts ---

    def _on_router(self, index: int, *call: Any) -> Any:
        output = call[-1]  # After the module and its arguments
        rows, each = self._rows, self.layers[index]
        if rows is None:
            return None
        paths, count = each.layer.output, len(rows.targets)
        logits, weights, chosen = (value_at(output, path) for path in (paths.logits, paths.weights, paths.chosen))
        is_part = self._is_part(each, rows, chosen.numel() // each.layer.per_token)
        is_first, counts = not is_in_backward(), row_counts(chosen, count, each.layer.count)
        if is_first and self._reports[is_part]:
            self._count(index, rows, logits=logits, counts=counts)
        if not self._has_terms:
            return None
        if (group := self._row_groups.get(is_part)) is not None:
            all_reduce(counts, group)
        terms = RowTerms(self._settings, each.scores, each.layer.per_token, rows.row_tokens)
        values = terms.values(logits, counts, rows.targets)
        if is_first and self._reports[is_part]:
            values_of_rows = values.detach().double()
            first = rows.first_row if self._is_reproducible else 0
            stop = first + count if self._is_reproducible else 1
            self._terms[index, first:stop] += values_of_rows if self._is_reproducible else values_of_rows.sum()
        if not values.requires_grad:
            return None
        apply: Any = _AddGradient.apply
        return with_values(output, {paths.weights: cast(Tensor, apply(weights, values.sum(), rows.scale))})

    def _is_part(self, each: BalancedLayer, rows: RoutedRows, tokens: int) -> int:
        """1 where tensor-parallel ranks have different tokens, and 0 where they have the same."""
        here = self._context.partition(rows.row_tokens).length(self._context_rank)
        if tokens == len(rows.targets) * here:
            return 0
        if tokens * self._tensor_ranks == len(rows.targets) * here:
            return 1
        raise InputError(
            f"[model.balance]: {each.layer.router} gets {tokens} tokens of {len(rows.targets)} rows of "
            f"{rows.row_tokens} tokens, so motet does not know to which row each belongs; set "
            "data.restart_documents = false, or leave the section out"
        )

    @torch.no_grad()
    def _count(self, index: int, rows: RoutedRows, *, logits: Tensor, counts: Tensor) -> None:
        is_counted = rows.targets > 0
        self._loads[index] += (counts * is_counted.unsqueeze(-1)).sum(0)
        self._entropies[index] += (entropies(logits, self.layers[index].scores, len(counts)) * is_counted).sum()

    @torch.no_grad()
    def _on_experts(self, index: int, experts: nn.Module, *call: Any) -> None:
        rows, layer = self._rows, self.layers[index].layer
        if rows is None or is_in_backward():
            return
        indices = value_at(arguments_of(*call), layer.indices)
        is_part = self._is_part(self.layers[index], rows, indices.numel() // layer.per_token)
        if self._reports[is_part]:
            dropped = (indices == layer.count).reshape(len(rows.targets), -1).sum(1)
            self._dropped[index] += (dropped * (rows.targets > 0)).sum()

    # --- the end of a step ---

    def local_numbers(self) -> Tensor:
        """The numbers of this rank, in float64, which is exact for counts below 2^53."""
        parts = [*self._loads, self._dropped, self._entropies, self._terms.view(-1)]
        return torch.cat([part.double() for part in parts])

    def loads_of(self, sums: Sequence[float]) -> tuple[ExpertLoads, Sequence[float]]:
        """The routing of a step from the sums of `local_numbers` over all ranks, and the terms of its loss."""
        numbers, count = iter(sums), len(self.layers)
        loads = [tuple(map(int, islice(numbers, each.layer.count))) for each in self.layers]
        dropped, sums_of_entropies = list(map(int, islice(numbers, count))), list(islice(numbers, count))
        terms = list(numbers)
        layers = (
            LayerLoads(each.layer.name, counts, lost, total / max(1.0, sum(counts) / each.layer.per_token))
            for each, counts, lost, total in zip(self.layers, loads, dropped, sums_of_entropies, strict=True)
        )
        return ExpertLoads(tuple(layers), sum(terms)), terms

    def apply(self, loads: ExpertLoads) -> None:
        """Keep the loads of a step that has updated the parameters, and move the corrections by them."""
        for router, correction, layer in zip(self._routers, self._corrections, loads.layers, strict=True):
            counts = torch.tensor(layer.loads, dtype=torch.int64)
            buffer = router.get_buffer("load")
            if not buffer.is_meta:
                buffer.copy_(counts)
            if correction is not None and not correction.is_meta:
                direction = torch.sign(counts.sum() - len(counts) * counts)
                correction.add_((self._settings.speed * direction.to(correction.dtype)).to(correction.device))
