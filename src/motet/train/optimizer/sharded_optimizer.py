"""Parameter groups, the gradient norm, and AdamW or SGD on sharded master parameters."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.checkpoint.manifest import COMPRESSION_STATE_PREFIX
from motet.core.errors import check_input
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import make_mesh
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel, ShardedParameters
from motet.parallel.data_parallel.zero import uses_row_shards
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.norms import exact_squared_norm, squared_norm
from motet.parallel.step_plan.plan import ParameterInventory
from motet.precision.recipe import PrecisionRecipe
from motet.train.optimizer.bitwise_reproducible_optimizer import BitwiseReproducibleOptimizer
from motet.train.optimizer.optimizer_settings import OptimizerSettings

# (learning-rate scale, weight decay): parameters with the same key share one flat tensor.
ParameterGroupKey = tuple[float, float]
ParameterGroups = dict[ParameterGroupKey, dict[str, nn.Parameter]]


def group_parameters(named: dict[str, nn.Parameter], settings: OptimizerSettings) -> ParameterGroups:
    """Parameters by learning-rate scale and weight decay, in the order of the module."""
    groups: ParameterGroups = {}
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
    first, examples = min(unmatched, default=""), ", ".join(list(named)[:3])
    sentence = f"optimizer.groups: no trainable parameter's name matches {first!r}; names look like {examples}"
    check_input(not unmatched, sentence)
    return groups


def trainable_parameters(module: nn.Module, settings: OptimizerSettings) -> ParameterInventory:
    """Shapes and groups of the parameters that are trained."""
    _, in_order = _grouped_parameters(module, settings)
    shapes = {name: tuple(p.shape) for name, (_, p) in in_order.items()}
    return ParameterInventory(shapes, {name: group_id for name, (group_id, _) in in_order.items()})


def _grouped_parameters(
    module: nn.Module, settings: OptimizerSettings
) -> tuple[list[ParameterGroupKey], dict[str, tuple[int, nn.Parameter]]]:
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, settings)
    group_ids = {name: group_id for group_id, members in enumerate(groups.values()) for name in members}
    return list(groups), {name: (group_ids[name], p) for name, p in named.items()}


def build_sharded_optimizer(
    module: nn.Module,
    settings: OptimizerSettings,
    recipe: PrecisionRecipe,
    group: RankGroup,
    sharding: DataParallelSharding,
    communication: CommunicationSettings,
) -> "ShardedOptimizer":
    """Shard the trainable parameters of a module over the ranks, with an optimizer for this rank's shards."""
    group_keys, in_order = _grouped_parameters(module, settings)
    mesh = make_mesh(group, resolve_communication_groups(communication, sharding))
    if uses_row_shards(sharding):
        parameters: ShardedParameters = FSDP2DataParallel(
            module, in_order, recipe, mesh=mesh, sharding=sharding, settings=communication
        )
    else:
        parameters = bucketed = BucketedDataParallel(in_order, recipe, mesh, sharding=sharding, settings=communication)
        if communication.overlap == "forward":
            bucketed.enable_forward_prefetch(module)
    return ShardedOptimizer(parameters, group_keys, settings, group if sharding.reproducible_batch_size else None)


class ShardedOptimizer:
    """The optimizer of this rank's shards of the parameters."""

    def __init__(
        self,
        sharded_parameters: ShardedParameters,
        group_keys: Sequence[ParameterGroupKey],
        settings: OptimizerSettings,
        reproducible_group: RankGroup | None = None,  # The ranks, if every layout must have the same bits
    ) -> None:
        self.sharded_parameters, self._settings = sharded_parameters, settings
        self._reproducible_group = reproducible_group
        self._learning_rate_scales = [scale for scale, _ in group_keys]
        self._masters = [nn.Parameter(master, requires_grad=False) for master in sharded_parameters.local_masters]
        group_ids = list(zip(self._masters, sharded_parameters.optimizer_groups, strict=True))
        groups = [
            {"params": [master for master, group in group_ids if group == group_id], "weight_decay": decay}
            for group_id, (_, decay) in enumerate(group_keys)
        ]
        make_optimizer = BitwiseReproducibleOptimizer if reproducible_group else make_torch_optimizer
        self._optimizer: torch.optim.Optimizer = make_optimizer(groups, settings)
        for master in self._masters if reproducible_group else ():
            self._optimizer_state(master)

    def squared_norm(self) -> float:
        """This rank's summand of the squared norm of all gradients; rank 0 has the whole sum if it must be exact."""
        contributes, group = self.sharded_parameters.mesh.contributes_to_norm, self._reproducible_group
        if group is None:
            return self.local_squared_norm() if contributes else 0.0
        # Stage 3 casts before the norm, and every stage must have the same bits.
        gradients = self.sharded_parameters.reduced_gradients() if contributes else []
        total = exact_squared_norm([gradient.to(self._masters[0].dtype) for gradient in gradients], group)
        return total if group.rank == 0 else 0.0

    def local_squared_norm(self) -> float:
        """The squared norm of the gradients of this rank, also if another rank of its replica group contributes it."""
        return float(sum(map(squared_norm, self.sharded_parameters.reduced_gradients())))

    def update(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """One step of the optimizer on the master parameters, from which the model is updated."""
        for group, scale in zip(self._optimizer.param_groups, self._learning_rate_scales, strict=True):
            group["lr"] = learning_rate * scale
        self.sharded_parameters.update(partial(self._update_masters, gradient_scale))

    @contextmanager
    def capture_gradients(self) -> Iterator[list[Tensor]]:
        """The gradients that the optimizer gets inside, one for each master; empty if it is not called."""
        captured: list[Tensor] = []

        def record_gradients(*_: Any) -> None:
            captured.extend(torch.zeros_like(master) for master in self._masters[len(captured) :])
            for index, master in enumerate(self._masters):
                if master.grad is not None:
                    captured[index] = master.grad.clone()

        handle = self._optimizer.register_step_pre_hook(record_gradients)
        try:
            yield captured
        finally:
            handle.remove()

    def _update_masters(self, gradient_scale: float, indices: Sequence[int]) -> None:
        """Gradients are cast, then scaled. Slices that need a cast are updated one by one, to save memory."""
        gradients, together = self.sharded_parameters.local_gradients(), dict[int | None, list[int]]()
        for index in indices:
            is_cast = gradients[index].dtype != self._masters[index].dtype
            together.setdefault(index if is_cast else None, []).append(index)
        for batch in together.values():
            masters = [self._masters[index] for index in batch]
            for master, index in zip(masters, batch, strict=True):
                master.grad = gradients[index].to(master.dtype)
            torch._foreach_mul_([m.grad for m in masters if m.grad is not None], gradient_scale)
            self._optimizer.step()
            for master in masters:
                master.grad = None

    def state(self) -> dict[str, LocalShard | Tensor]:
        """Masters and moments by name, as views: writing to them in place restores the state."""
        parameters = self.sharded_parameters
        parameters.wait_for_pending()
        state: dict[str, LocalShard | Tensor] = dict(self._named_shards("master", parameters.local_masters))
        moments = [self._optimizer_state(tensor) for tensor in self._masters]
        for kind, first in moments[0].items():  # the count of steps is the same for all tensors
            state |= self._named_shards(kind, [kinds[kind] for kinds in moments]) if first.ndim else {kind: first}
        compression = parameters.communicator.compression_state()
        return state | {f"{COMPRESSION_STATE_PREFIX}{name}": shard for name, shard in compression.items()}

    def sync_parameters(self) -> None:
        """Update the parameters after `state()` was written to."""
        first_count, *other_counts = [self._optimizer_state(tensor).get("step") for tensor in self._masters]
        for count in other_counts:
            if count is not None and first_count is not None:
                count.copy_(first_count)
        self.sharded_parameters.sync_parameters()

    def _named_shards(self, kind: str, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        return {f"{kind}/{name}": shard for name, shard in self.sharded_parameters.local_shards(tensors).items()}

    def _optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        moments: dict[str, Any] = self._optimizer.state[parameter]
        if self._settings.name == "adamw" and not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        if self._settings.name == "sgd" and self._settings.momentum and not moments:
            # torch sets the buffer to the first gradient; from zero, momentum x 0 + gradient is the same.
            moments["momentum_buffer"] = torch.zeros_like(parameter)
        return {kind: value for kind, value in moments.items() if isinstance(value, Tensor)}


def make_torch_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    rate, momentum, nesterov = settings.learning_rate, settings.momentum, settings.nesterov
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, fused=True)
