"""From the `[optimizer]` section to an update: parameter groups, the norm, and AdamW or SGD on flat shards."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from motet.checkpoint.manifest import COMPRESSION_STATE_PREFIX
from motet.core.errors import InputError
from motet.parallel.data_parallel.bucketed_zero import build_bucketed_data_parallel
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import make_mesh
from motet.parallel.data_parallel.fsdp import apply_fsdp
from motet.parallel.data_parallel.sharded_parameters import LocalShard, ShardedParameters
from motet.parallel.data_parallel.zero import uses_row_shards
from motet.parallel.layout import Layout
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.accurate_norm import squared_norm
from motet.parallel.reproducible.exact_norm import exact_squared_norm
from motet.parallel.step_plan.plan import ParameterInventory
from motet.precision.recipe import PrecisionRecipe
from motet.train.optimizer.bitwise_reproducible_optimizer import BitwiseReproducibleOptimizer
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# (learning-rate scale, weight decay): parameters that agree in both share one flat tensor.
ParameterGroupKey = tuple[float, float]


def group_parameters(
    named: dict[str, nn.Parameter], settings: OptimizerSettings
) -> dict[ParameterGroupKey, dict[str, nn.Parameter]]:
    """Sort parameters by what their update needs, in the order of the module."""
    groups: dict[ParameterGroupKey, dict[str, nn.Parameter]] = {}
    unmatched = {pattern for group in settings.groups for pattern in group.match}
    for name, parameter in named.items():
        scale, decay = 1.0, settings.weight_decay if parameter.ndim > 1 else 0.0
        for group in settings.groups:
            hits = {pattern for pattern in group.match if fnmatch.fnmatchcase(name, pattern)}
            unmatched -= hits
            if hits:
                scale = group.learning_rate_scale
                decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((scale, decay), {})[name] = parameter
    if unmatched:
        raise InputError(
            f"optimizer.groups: no trainable parameter's name matches {sorted(unmatched)[0]!r}; "
            f"names look like {', '.join(list(named)[:3])}"
        )
    return groups


def trainable_parameters(module: nn.Module, settings: OptimizerSettings) -> ParameterInventory:
    """What is trained, as values."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = enumerate(group_parameters(named, settings).values())
    group_ids = {name: number for number, members in groups for name in members}
    return ParameterInventory({name: tuple(p.shape) for name, p in named.items()}, group_ids)


def build_sharded_optimizer(
    module: nn.Module,
    settings: OptimizerSettings,
    recipe: PrecisionRecipe,
    group: RankGroup,
    layout: Layout,
    communication: CommunicationSettings,
) -> "ShardedOptimizer":
    """Spread the trainable parameters of a module over the ranks, with an optimizer for what this one keeps."""
    groups = group_parameters({name: p for name, p in module.named_parameters() if p.requires_grad}, settings)
    grouped_parameters = {
        name: (number, p) for number, members in enumerate(groups.values()) for name, p in members.items()
    }
    in_order = {name: grouped_parameters[name] for name, p in module.named_parameters() if p.requires_grad}
    mesh = make_mesh(group, resolve_communication_groups(communication, layout))
    if uses_row_shards(layout):
        sharded_parameters: ShardedParameters = apply_fsdp(module, in_order, recipe, mesh, layout, communication)
    else:
        sharded_parameters = bucketed = build_bucketed_data_parallel(in_order, recipe, mesh, layout, communication)
        if communication.overlap == "forward":
            bucketed.enable_forward_prefetch(module)
    return ShardedOptimizer(
        sharded_parameters, list(groups), settings, group if layout.reproducible_batch_size else None
    )


class ShardedOptimizer:
    """The optimizer of this rank's shards of the weights."""

    def __init__(
        self,
        sharded_parameters: ShardedParameters,
        group_keys: Sequence[ParameterGroupKey],
        settings: OptimizerSettings,
        reproducible_group: RankGroup | None = None,
    ) -> None:
        """`exactly`: the ranks, where every layout is to have the same bits."""
        self.sharded_parameters = sharded_parameters
        self._reproducible_group = reproducible_group
        self._settings = settings
        self._learning_rate_scales = [scale for scale, _ in group_keys]
        self._master_parameters = [
            nn.Parameter(master, requires_grad=False) for master in sharded_parameters.local_masters
        ]
        groups = [
            {
                "params": [
                    t
                    for t, group in zip(self._master_parameters, sharded_parameters.optimizer_groups, strict=True)
                    if group == number
                ],
                "weight_decay": decay,
            }
            for number, (_, decay) in enumerate(group_keys)
        ]
        self._optimizer = (
            BitwiseReproducibleOptimizer(groups, settings)
            if reproducible_group
            else make_torch_optimizer(groups, settings)
        )
        for tensor in self._master_parameters if reproducible_group else ():
            self._optimizer_state(tensor)

    def squared_norm(self) -> float:
        """What this rank adds to the square of the norm of all gradients; where that must be exact, one adds it all."""
        if self._reproducible_group:
            total = exact_squared_norm(
                self.sharded_parameters.reduced_gradients() if self.sharded_parameters.contributes_to_norm else [],
                self._reproducible_group,
            )
            return total if self._reproducible_group.rank == 0 else 0.0
        return self.local_squared_norm() if self.sharded_parameters.contributes_to_norm else 0.0

    def local_squared_norm(self) -> float:
        """What this rank has of it, whether it counts or a replica's does."""
        return float(sum(map(squared_norm, self.sharded_parameters.reduced_gradients())))

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_(list(self.sharded_parameters.reduced_gradients()), factor)

    def update(self, learning_rate: float) -> None:
        """One step of the optimizer on the masters, and the result handed to the model."""
        for group, scale in zip(self._optimizer.param_groups, self._learning_rate_scales, strict=True):
            group["lr"] = learning_rate * scale
        self.sharded_parameters.update(self._update_masters)

    @contextmanager
    def capture_gradients(self) -> Iterator[list[Tensor]]:
        """The gradients that the optimizer is given inside, one for each master; nothing where it is not called."""
        captured: list[Tensor] = []

        def record_gradients(*_: Any) -> None:
            captured.extend(torch.zeros_like(master) for master in self._master_parameters[len(captured) :])
            for index, master in enumerate(self._master_parameters):
                if master.grad is not None:
                    captured[index] = master.grad.clone()

        handle = self._optimizer.register_step_pre_hook(record_gradients)
        try:
            yield captured
        finally:
            handle.remove()

    def _update_masters(self, indices: Sequence[int]) -> None:
        gradients = self.sharded_parameters.local_gradients()
        for index in indices:
            self._master_parameters[index].grad = gradients[index]
        self._optimizer.step()
        for index in indices:
            self._master_parameters[index].grad = None

    def state(self) -> dict[str, LocalShard | Tensor]:
        """Masters and moments by name, as views: reading gives the state, writing in place restores it."""
        self.sharded_parameters.wait_for_pending()
        state: dict[str, LocalShard | Tensor] = dict(
            self._named_shards("master", self.sharded_parameters.local_masters)
        )
        moments = [self._optimizer_state(tensor) for tensor in self._master_parameters]
        for kind, first in moments[0].items():
            if first.ndim == 0:
                state[kind] = first  # the count of steps: all tensors take theirs together
            else:
                state |= self._named_shards(kind, [kinds[kind] for kinds in moments])
        return state | {
            f"{COMPRESSION_STATE_PREFIX}{name}": part
            for name, part in self.sharded_parameters.compression_state().items()
        }

    def sync_parameters(self) -> None:
        """After `state()` was written to."""
        first_count, *other_counts = [self._optimizer_state(tensor).get("step") for tensor in self._master_parameters]
        for count in other_counts:
            if count is not None and first_count is not None:
                count.copy_(first_count)
        self.sharded_parameters.sync_parameters()

    def _named_shards(self, kind: str, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        return {f"{kind}/{name}": piece for name, piece in self.sharded_parameters.local_shards(tensors).items()}

    def _optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer's own tensors of one tensor, made now if no step was taken yet."""
        moments: dict[str, Any] = self._optimizer.state[parameter]
        if self._settings.name == "adamw" and not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        if self._settings.name == "sgd" and self._settings.momentum and not moments:
            # torch sets the buffer to the first gradient; from zero, momentum x 0 + gradient is the same.
            moments["momentum_buffer"] = torch.zeros_like(parameter)
        return {kind: value for kind, value in moments.items() if isinstance(value, Tensor)}


def make_torch_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(
        groups, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.nesterov, fused=True
    )
