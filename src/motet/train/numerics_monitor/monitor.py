"""Measures the effect of number formats on the tensors of a step, and adds up the counts of all ranks.

Each element counts once: of identical copies the first rank counts, and a rank with a shard counts its elements without
padding. So the counts of weights and of gradients do not depend on the layout, up to the order in which gradients are
added.

Counts of the outputs of blocks and linear layers, and of their gradients, by hooks that stay for one step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.collectives.execute.api import all_gather, all_reduce
from motet.core.trace import span
from motet.models.torch_private import is_in_backward
from motet.models.user_module import find_blocks
from motet.monitor.events import LostInFormat, NumericsKind, NumericsMeasured, TensorNumerics
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.step_plan.plan import CopyKind, IdenticalCopies, StepPlan, copies_in_plan
from motet.parallel.sync_groups import same_loss_ranks
from motet.precision.recipe import PrecisionRecipe
from motet.precision.value_counts import LOWEST_EXPONENT, count_values, counts_of_row, row_length
from motet.train.engine import TrainingEngine

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ActivationSite(NamedTuple):
    """A module whose outputs are counted."""

    name: str
    weight: str | None = None  # The name of a linear layer's weight in the inventory
    output_dim: int = 0  # The dimension of the weight that becomes the features of the output


def activation_sites(module: nn.Module, plan: StepPlan) -> list[ActivationSite]:
    """Blocks and linear layers in the order of the module; the same list on every rank, whatever its shards."""
    blocks = set(find_blocks(module))
    matrices = {tensor.name for tensor in plan.inventory.tensors if len(tensor.shape) == 2}
    sites = []
    for name, inner in module.named_modules():
        weight = f"{name}.weight"
        is_linear = weight in matrices and not isinstance(inner, nn.Embedding) and not any(inner.children())
        if inner in blocks or is_linear:
            # Other layers of one matrix, such as Conv1D of transformers, keep it transposed.
            output_dim = 0 if isinstance(inner, nn.Linear) else 1
            sites.append(ActivationSite(name, weight, output_dim) if is_linear else ActivationSite(name))
    return sites


class ActivationCounts:
    """The counts of a step on this rank: a row for each site, and one for the gradient there."""

    def __init__(
        self,
        module: nn.Module,
        sites: Sequence[ActivationSite],
        formats: Sequence[torch.dtype],
        *,
        device: torch.device,
    ) -> None:
        self._formats = formats
        shape = len(sites), row_length(len(formats))
        self.outputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self.gradients = torch.zeros_like(self.outputs)
        # Elements, and the sum of their bits, of outputs and gradients: ranks with other numbers have other tensors.
        self.digests = torch.zeros(len(sites), 4, dtype=torch.int64, device=device)
        modules: Mapping[str, nn.Module] = dict(module.named_modules())
        self._handles: list[RemovableHandle] = [
            modules[site.name].register_forward_hook(partial(self._on_output, index))
            for index, site in enumerate(sites)
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _on_output(self, index: int, *call: Any) -> None:
        tensor = _first_floating(call[-1])  # The output follows the module and its arguments
        if tensor is None or is_in_backward():  # Recomputation repeats counted outputs
            return
        self._add(index, tensor, rows=self.outputs, column=0)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._on_gradient, index))

    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        self._add(index, gradient, rows=self.gradients, column=2)

    @torch.no_grad()
    def _add(self, index: int, tensor: Tensor, *, rows: Tensor, column: int) -> None:
        rows[index] += count_values(tensor, self._formats)
        self.digests[index, column] += tensor.numel()
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.dtype.itemsize])
        self.digests[index, column + 1] += bits.sum(dtype=torch.int64)


def _first_floating(output: Any) -> Tensor | None:
    """The first tensor of floating-point numbers in the output of a module."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((tensor for tensor in map(_first_floating, items) if tensor is not None), None)


_NARROW_FORMAT = "float16"  # Counted with every recipe, to show whether float16 would do


@dataclass(frozen=True)
class NumericsMonitor:
    """The monitor of one rank."""

    engine: TrainingEngine
    recipe: PrecisionRecipe
    every_steps: int

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every_steps == 0

    @property
    def format_names(self) -> tuple[str, ...]:
        """The formats in which losses are counted: that of the recipe first."""
        return tuple(dict.fromkeys([self.recipe.compute, _NARROW_FORMAT]))

    @cached_property
    def _formats(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.format_names]

    @cached_property
    def _sites(self) -> list[ActivationSite]:
        return activation_sites(self.engine.module, self.engine.plan)

    @cached_property
    def _trained(self) -> list[str]:
        return [tensor.name for tensor in self.engine.plan.inventory.tensors if tensor.kind == "trained"]

    def begin(self) -> ActivationCounts:
        """Count the activations of the forwards and backwards that follow, in which blocks run eagerly."""
        if self.engine.compiled is not None:
            self.engine.compiled.is_paused = True  # A graph knows no hook that stays for one step
        return ActivationCounts(self.engine.module, self._sites, self._formats, device=self.engine.group.device)

    def finish(self, step: int, activations: ActivationCounts) -> NumericsMeasured:
        """The numerics of a step (from 0), before its update. All ranks that take the step call this."""
        activations.remove()
        if self.engine.compiled is not None:
            self.engine.compiled.is_paused = False
        with span("numerics"):
            engine = self.engine
            parameters = engine.optimizer.sharded_parameters
            masters = parameters.local_shards(parameters.local_masters)
            tables: dict[NumericsKind, Tensor] = {
                "weights": self._count_shards(masters, "states"),
                "gradients": self._count_shards(parameters.reduced_shards(), "gradients"),
                **self._counted_activations(activations),
            }
            table = torch.cat([*tables.values()])
            all_reduce(table, engine.step_group, op="sum")
        names: dict[NumericsKind, list[str]] = {"weights": self._trained, "gradients": self._trained}
        sites = [site.name for site in self._sites]
        labels = [(kind, name) for kind in tables for name in names.get(kind, sites)]
        rows = zip(labels, table.tolist(), strict=True)
        tensors = (_tensor_numerics(kind, name, row=row, formats=self.format_names) for (kind, name), row in rows)
        return NumericsMeasured(
            step=step + 1,
            formats=self.format_names,
            backward_scale=engine.backward_scale if engine.optimizer.loss_scaler else None,
            tensors=tuple(tensor for tensor in tensors if tensor.elements),
        )

    def _count_shards(self, shards: Mapping[str, LocalShard], kind: CopyKind) -> Tensor:
        """A row for each trained tensor, of the elements that this rank counts."""
        rank, plan = self.engine.step_group.rank, self.engine.plan
        counted = set(_counted_names(copies_in_plan(plan), kind, rank))
        shape = len(self._trained), row_length(len(self._formats))
        rows = torch.zeros(shape, dtype=torch.int64, device=self.engine.group.device)
        for index, name in enumerate(self._trained):
            if name not in counted or name not in shards:
                continue
            values, start = shards[name].values.reshape(-1), shards[name].start
            for _, local in plan.specs[name][rank].boxes(start, start + len(values)):
                counts = count_values(values[local.start - start : local.stop - start], self._formats)
                rows[index] += counts.to(rows.device)  # Masters may lie on the host
        return rows

    def _counted_activations(self, activations: ActivationCounts) -> dict[NumericsKind, Tensor]:
        """The rows of this rank, without rows that another rank counts."""
        group = self.engine.step_group
        local = activations.digests
        gathered = local.new_empty(group.world * len(local), local.shape[1])
        all_gather(gathered, local, group)
        digests = gathered.view(group.world, *local.shape).tolist()
        ranks = same_loss_ranks(self.engine.plan.dims, group.rank)
        rows: dict[NumericsKind, Tensor] = {
            "activations": activations.outputs,
            "activation_gradients": activations.gradients,
        }
        for column, counts in enumerate(rows.values()):
            for index, site in enumerate(self._sites):
                rank_digests = {rank: digests[rank][index][2 * column : 2 * column + 2] for rank in ranks}
                if not self._counts_activation(site, rank_digests, group.rank):
                    counts[index] = 0
        return rows

    def _counts_activation(self, site: ActivationSite, digests: Mapping[int, list[int]], rank: int) -> bool:
        """Whether this rank counts the output of a site. Ranks that split the outputs of a layer have parts of it. The
        others of a tensor-parallel group have parts, too, or copies: then all their digests are equal."""
        features = dict[int, object]()
        if site.weight is not None:
            specs = self.engine.plan.specs[site.weight]
            if rank not in specs:  # A layer that another stage of the pipeline holds
                return False
            features = {other: specs[other].spans[site.output_dim] for other in digests if other in specs}
        alike = [other for other in digests if features.get(other) == features.get(rank)]
        is_copied = all(digests[other] == digests[rank] for other in alike)
        return not is_copied or alike[0] == rank


def _counted_names(copies: Iterable[IdenticalCopies], kind: CopyKind, rank: int) -> Iterator[str]:
    """The tensors whose shard this rank is the first to hold."""
    for each in copies:
        if each.kind == kind and any(ranks[0] == rank for ranks in each.rank_groups):
            yield from each.names


def _tensor_numerics(kind: NumericsKind, name: str, *, row: Sequence[int], formats: Sequence[str]) -> TensorNumerics:
    counts = counts_of_row(row)
    used = [index for index, count in enumerate(counts.by_exponent) if count]
    first, stop = (used[0], used[-1] + 1) if used else (0, 0)
    return TensorNumerics(
        kind=kind,
        name=name,
        elements=counts.zeros + counts.infinite + counts.nan + sum(counts.by_exponent),
        zeros=counts.zeros,
        infinite=counts.infinite,
        nan=counts.nan,
        formats=tuple(
            LostInFormat(dtype=dtype, **lost._asdict()) for dtype, lost in zip(formats, counts.by_format, strict=True)
        ),
        lowest_exponent=LOWEST_EXPONENT + first,
        exponents=counts.by_exponent[first:stop],
    )
