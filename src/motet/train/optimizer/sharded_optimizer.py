"""Parameter groups, the gradient norm, and AdamW or SGD on sharded master parameters."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from motet.core.errors import names_matching
from motet.memory.policy_choice import MemorySettings
from motet.memory.tiers.optimizer_states import FileStates, HostStates, make_states
from motet.models.parameter_values import ParameterValues
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.composite import CompositeDataParallel, make_data_parallel_engines
from motet.parallel.data_parallel.flat_parameters import BroadcastValues, LocalShard, fill_parameters
from motet.parallel.pipeline.stages.stage_module import forget_parameters
from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import exact_squared_norm, squared_norm, sum_on_device
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.float64_mode import float32_zero
from motet.precision.recipe import LossScaler, PrecisionRecipe
from motet.train.optimizer.compact_moments_optimizer import (
    BitwiseReproducibleOptimizer,
    CompactMomentsOptimizer,
    ElementwiseUpdate,
    elementwise_update,
)
from motet.train.optimizer.module_plan import ParameterGroupKey, grouped_parameters
from motet.train.optimizer.one_pass_adamw import OnePassAdamW, takes_one_pass
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.pending_gradients import KIND, RATE, PendingGradients


def build_sharded_optimizer(
    module: nn.Module,
    plan: StepPlan,
    settings: OptimizerSettings,
    recipe: PrecisionRecipe,
    *,
    group: RankGroup,
    communication: CommunicationSettings,
    values: ParameterValues | None = None,
    memory: MemorySettings | None = None,
) -> "ShardedOptimizer":
    """Shard the trainable parameters of a module over the ranks, with an optimizer for this rank's shards.
    Parameters get `values`, by default the values of the first rank's module. `memory` says where masters and moments
    lie, by default on the device."""
    group_keys, trained = grouped_parameters(module, settings)
    for patterns, _ in recipe.moment_exceptions:
        names_matching(patterns, trained, "precision.exceptions: no trainable parameter's name matches {!r}")
    values = values or BroadcastValues(module, group)
    specs = {name: specs[group.rank] for name, specs in plan.specs.items() if group.rank in specs}
    if plan.model_sharding.stages:
        others, compute = {name for name, _ in module.named_parameters()} - specs.keys(), getattr(torch, recipe.compute)
        forget_parameters(module, others, device=group.device, dtype=compute)
    for name, parameter in module.named_parameters():
        if name not in specs:
            continue
        is_split = name in specs and specs[name].local_shape != parameter.shape
        parameter.data = parameter.new_empty(specs[name].local_shape) if is_split else parameter.data.contiguous()
    dtype = getattr(torch, recipe.master)
    states = make_states(
        memory or MemorySettings(),
        dtype,
        group.device,
        moments=settings.moment_kinds,
        overlaps=communication.overlap == "forward",
    )
    engines = make_data_parallel_engines(
        module, plan.groups, recipe, group=group, settings=communication, states=states
    )
    fill_parameters(module, engines.unfilled_shards(), specs, values=values, device=group.device)
    is_reproducible = any(a.kind.startswith("tree_") for unit in plan.comm_units for a in unit.schedule)
    compact = None if recipe.moments_are_masters_dtype else partial(CompactMomentsOptimizer, recipe=recipe, specs=specs)
    reproducible = group if is_reproducible else None
    return ShardedOptimizer(engines, group_keys, settings, reproducible, make_compact=compact, states=states)


class ShardedOptimizer:
    """The optimizer of this rank's shards of the parameters."""

    def __init__(
        self,
        sharded_parameters: CompositeDataParallel,
        group_keys: Sequence[ParameterGroupKey],
        settings: OptimizerSettings,
        reproducible_group: RankGroup | None = None,  # The ranks, if every layout must have the same bits
        *,
        make_compact: Callable[..., CompactMomentsOptimizer] | None = None,  # If moments are stored in another format
        states: HostStates | None = None,  # If the host updates masters
    ) -> None:
        self.sharded_parameters, self._settings, self.states = sharded_parameters, settings, states
        self._captured: list[Tensor] | None = None
        # Called with the indices of masters before they, their moments or their pending gradients change
        self.before_update: Callable[[Collection[int]], None] = _let_pass
        self.loss_scaler: LossScaler | None = None  # Set in fp16
        self._reproducible_group, self._gradient_scale = reproducible_group, 1.0
        self._learning_rate_scales = [scale for scale, _ in group_keys]
        # A rank that holds nothing updates an empty tensor: it has the names and the step count of all others.
        masters, group_ids = sharded_parameters.local_masters, sharded_parameters.optimizer_groups
        self._masters = [nn.Parameter(m, requires_grad=False) for m in masters or [sharded_parameters.no_elements]]
        group_of_master = list(zip(self._masters, group_ids or [0], strict=True))
        groups = [
            {"params": [m for m, group in group_of_master if group == group_id], "weight_decay": decay}
            for group_id, (_, decay) in enumerate(group_keys)
        ]
        make_optimizer: Callable[..., torch.optim.Optimizer]
        make_optimizer = BitwiseReproducibleOptimizer if reproducible_group else make_torch_optimizer
        if make_compact is not None:
            shards = sharded_parameters.local_shards(self._masters if masters else [])
            make_optimizer = partial(make_compact, shards=shards)
        self._optimizer = make_optimizer(groups, settings)
        self._compact = self._optimizer if isinstance(self._optimizer, CompactMomentsOptimizer) else None
        for master in self._masters if (reproducible_group or states) and not self._compact else ():
            self._optimizer_state(master)
        self._pending: PendingGradients | None = None
        if states is not None and states.delays:
            self._pending = PendingGradients(self._masters, states.host_tensor)
            states.make_room_to_stage()
        self._one_pass: OnePassAdamW | None = None
        is_torchs = not (reproducible_group or states or self._compact)
        if is_torchs and masters and takes_one_pass(settings, self._masters):
            self._one_pass = OnePassAdamW(self._optimizer, settings, sharded_parameters.let_update_cast())
        self._queued = dict[int, Tensor]()  # The gradients of masters that the host has yet to update
        sharded_parameters.set_optimizer(self._update_masters)

    def begin_step(self) -> None:
        """Begin a step, during which the host applies the pending gradients of the one before."""
        self.sharded_parameters.begin_step()
        if self.states is None or self._pending is None or (rate := self._pending.learning_rate) is None:
            return
        self._set_rates(rate)
        self._gradient_scale = 1.0
        self._queued = dict(enumerate(self._pending.gradients if self.sharded_parameters.optimizer_groups else ()))
        self.states.updates.start(self.sharded_parameters.update_order or [*self._queued], self._update_slice)

    def squared_norm(self) -> Tensor:
        """This rank's summand of the squared norm of all gradients, on its device; rank 0 has the whole sum if it must
        be exact."""
        group, gradients = self._reproducible_group, self.sharded_parameters.counted_gradients()
        device = self.sharded_parameters.no_elements.device
        if group is None:
            return sum_on_device([*map(squared_norm, gradients)], device)
        # Stage 3 casts before the norm, and every stage must have the same bits.
        total = exact_squared_norm([gradient.to(self._masters[0].dtype) for gradient in gradients], group)
        return torch.tensor(total if group.rank == 0 else 0.0, dtype=torch.float64, device=device)

    @property
    def loss_scale(self) -> int:
        """The factor of the mean loss in backward."""
        return self.loss_scaler.scale if self.loss_scaler else 1

    @property
    def rounding_seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._compact.seed if self._compact else 0

    @rounding_seed.setter
    def rounding_seed(self, seed: int) -> None:
        if self._compact:
            self._compact.seed = seed

    def rescale(self, is_overflow: bool, count: float) -> None:
        """Count a step with `count` targets whose gradients overflowed or did not; the next scale follows."""
        if self.loss_scaler is not None:
            scaler = self.loss_scaler.with_targets(count)
            if not is_overflow:
                scaler = scaler.after_step()
            elif scaler.targets <= self.loss_scaler.targets:  # More targets make the next backward smaller already
                scaler = scaler.after_overflow()
            self.loss_scaler = scaler
            scaler.check_can_continue()

    def update(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """One step of the optimizer on the master parameters, from which the model is updated."""
        has_applied = self._end_delayed_update()
        self._set_rates(learning_rate)
        self._gradient_scale, self._queued = gradient_scale, {}
        self.sharded_parameters.update()
        if self._pending is not None:
            self._pending.set_rate(learning_rate)
            if has_applied:
                self._send_delayed_values()
        elif self.states is not None and self.states.overlaps:
            order = self.sharded_parameters.update_order
            self.states.updates.start(order or [*self._queued], self._update_slice)
            if order is None:  # No forward has told which values are needed first
                self.sharded_parameters.wait_for_pending()
        if not self.sharded_parameters.optimizer_groups and self._pending is None:
            self._update_in_memory({0: self.sharded_parameters.no_elements})

    def skip(self) -> None:
        """End a step whose gradients are not applied. Those of the step before are."""
        if self._end_delayed_update():
            self._send_delayed_values()

    def _end_delayed_update(self) -> bool:
        """Wait until the pending gradients are applied; returns whether there were any."""
        if self.states is None or self._pending is None or self._pending.learning_rate is None:
            return False
        self.states.updates.wait()
        if not self.sharded_parameters.optimizer_groups:
            self._update_in_memory({0: self.sharded_parameters.no_elements})
        self._pending.clear()
        return True

    def _send_delayed_values(self) -> None:
        """Let the model compute with the masters to which pending gradients were applied in this step."""
        assert self.states is not None
        slices = range(len(self.sharded_parameters.optimizer_groups))
        order = self.sharded_parameters.update_order
        self.states.send_staged(order or slices)
        if self.states.overlaps:
            self.sharded_parameters.expect_values()
            if order is None:
                self.sharded_parameters.wait_for_pending()
        else:
            self.states.wait_for_arrival(slices)
            self.sharded_parameters.gather_parameters()

    def _set_rates(self, learning_rate: float) -> None:
        for group, scale in zip(self._optimizer.param_groups, self._learning_rate_scales, strict=True):
            group["lr"] = learning_rate * scale

    @contextmanager
    def capture_gradients(self) -> Iterator[list[Tensor]]:
        """The gradients that the optimizer gets inside, one for each master; empty if it is not called. Delayed
        gradients are captured in their step."""
        captured: list[Tensor] = []
        self._captured = captured
        try:
            yield captured
        finally:
            if self.states is not None and self.states.overlaps:
                self.sharded_parameters.wait_for_pending()
            self._captured = None

    def _capture(self, gradients: Mapping[int, Tensor]) -> None:
        if self._captured is not None:
            self._captured.extend(torch.zeros_like(master) for master in self._masters[len(self._captured) :])
            for index, gradient in gradients.items():
                self._captured[index] = gradient.clone()

    def _update_masters(self, gradients: Mapping[int, Tensor]) -> None:
        """Gradients are cast, then scaled. Slices that need a cast are updated one by one, to save memory. The host
        updates slice by slice, for values that the device waits for."""
        if self._one_pass is not None:
            self._update_in_one_pass(gradients)
        elif self.states is None:
            self._update_in_memory(gradients)
        elif self._pending is not None:
            self.before_update(gradients)
            with self.states.updating(gradients):
                self._pending.keep(gradients, self._gradient_scale)
            self._capture({index: self._pending.gradients[index] for index in gradients})
        elif self.states.overlaps:
            self._queued |= gradients
        else:
            self._queued, order = dict(gradients), [*gradients]
            for position, index in enumerate(order, 1):
                self._update_slice(index, order[position:])

    def _update_slice(self, index: int, following: Sequence[int]) -> None:
        """Update a master on the host. Files of masters that follow are read meanwhile."""
        assert self.states is not None
        self.before_update([index])
        gradient = self._queued.pop(index)  # The sums of the next step get its memory
        # Pending gradients have arrived, and sums of this step may be under way
        with self.states.updating([index] if self._pending is None else []):
            if isinstance(self.states, FileStates):
                self._update_in_files(index, gradient, following)
            else:
                self._update_in_memory({index: gradient})
                master = self._masters[index]
                self._report(index, slice(0, master.numel()), master)

    def _report(self, index: int, elements: slice, masters: Tensor) -> None:
        """Let the device have updated elements; after a delayed update, at the end of the step."""
        assert self.states is not None
        if self._pending is None:
            self.states.send(index, elements, masters)
        else:
            self.states.stage(index, elements, masters)

    def _update_in_files(self, index: int, gradient: Tensor, following: Sequence[int]) -> None:
        """Update a slice piece by piece."""
        assert isinstance(self.states, FileStates)
        master = self._masters[index]
        group = next(g for g in self._optimizer.param_groups if any(each is master for each in g["params"]))
        step = self._optimizer_state(master).get("step")
        update_piece = piece_update(self._settings, group, step, is_exact=self._reproducible_group is not None)
        captured = self._captured if self._pending is None else None
        if captured is not None:
            self._capture({index: torch.zeros_like(master)})

        def update(elements: slice, tensors: Mapping[str, Tensor]) -> None:
            scaled = gradient[elements].to(master.dtype).mul_(self._gradient_scale)
            if captured is not None:
                captured[index][elements] = scaled
            update_piece(tensors["master"], scaled, [tensors[kind] for kind in self._settings.moment_kinds])
            self._report(index, elements, tensors["master"])

        self.states.update(index, update, following)
        if step is not None:
            step += 1

    def _update_in_one_pass(self, gradients: Mapping[int, Tensor]) -> None:
        assert self._one_pass is not None
        self.before_update(gradients)
        masters = {index: self._masters[index] for index in gradients}
        if self._captured is not None:
            scaled = ((index, gradients[index].to(master.dtype)) for index, master in masters.items())
            self._capture({index: gradient * self._gradient_scale for index, gradient in scaled})
        states = {index: self._optimizer_state(master) for index, master in masters.items()}
        torch._foreach_add_([state["step"] for state in states.values()], 1)
        with torch.no_grad():
            self._one_pass.update(masters, gradients, states, scale=self._gradient_scale)

    def _update_in_memory(self, gradients: Mapping[int, Tensor]) -> None:
        self.before_update(gradients)
        together: dict[int | None, list[int]] = {}
        for index, gradient in gradients.items():
            is_cast = gradient.dtype != self._masters[index].dtype
            together.setdefault(index if is_cast else None, []).append(index)
        for batch in together.values():
            masters = [self._masters[index] for index in batch]
            for master, index in zip(masters, batch, strict=True):
                if self._compact is None:
                    self._optimizer_state(master)  # Made in its formats; torch would take others in float64
                master.grad = gradients[index].to(master.dtype)
            torch._foreach_mul_([m.grad for m in masters if m.grad is not None], self._gradient_scale)
            if self._pending is None:
                gradients_of = zip(batch, masters, strict=True)
                self._capture({index: master.grad for index, master in gradients_of if master.grad is not None})
            self._optimizer.step()
            for master in masters:
                master.grad = None

    @property
    def changed_kinds(self) -> set[str]:
        """The kinds of state with one tensor for each master that an update changes in place."""
        moments = () if self._compact else self._settings.moment_kinds  # Decoded copies do not change
        return {"master", *moments, *([KIND] if self._pending is not None else [])}

    def index_by_parameter(self) -> dict[str, int]:
        """The index of the master that holds elements of a parameter, by its name."""
        indices = [torch.tensor(i).expand(master.numel()) for i, master in enumerate(self._masters)]
        shards = self.sharded_parameters.local_shards(indices if self.sharded_parameters.optimizer_groups else [])
        return {name: int(each.values.reshape(-1)[0]) for name, each in shards.items() if each.values.numel()}

    def state_kinds(self) -> dict[str, Tensor]:
        """The state of one master by kind; a tensor without dimensions is the same for all masters."""
        return {"master": self._masters[0], **self._optimizer_state(self._masters[0])}

    def state_by_kind(self) -> dict[str, dict[str, LocalShard]]:
        """Masters and moments by kind and name, as views; a count that all parameters share has the name "".

        Moments that are stored in another format are decoded copies, which `sync_parameters` stores.
        """
        parameters = self.sharded_parameters
        parameters.wait_for_pending()
        if self.states is not None:
            self.states.refresh()
        moments = [self._optimizer_state(tensor) for tensor in self._masters]
        by_kind = {"master": parameters.local_shards(self._masters)}
        for kind, first in moments[0].items():
            count = {"": LocalShard(first.shape, 0, first)}
            by_kind[kind] = parameters.local_shards([kinds[kind] for kinds in moments]) if first.ndim else count
        if self._pending is not None:
            by_kind[KIND] = parameters.local_shards(self._pending.gradients)
            by_kind[RATE] = {"": LocalShard(torch.Size(), 0, self._pending.rate)}
        return by_kind

    @property
    def delays(self) -> bool:
        """Whether the gradients of a step are applied in the next one."""
        return self._pending is not None

    def forget_pending_gradients(self) -> None:
        """Continue from a state without gradients that wait for their update."""
        if self._pending is not None:
            self._pending.clear()

    def state(self) -> dict[str, LocalShard | Tensor]:
        """Masters and moments as `KIND/NAME`, as views: writing to them in place restores the state."""
        return {
            f"{kind}/{name}" if name else kind: shard if name else shard.values
            for kind, shards in self.state_by_kind().items()
            for name, shard in shards.items()
        }

    def sync_parameters(self) -> None:
        """Update the parameters and stored moments after `state()` was written to."""
        if self._compact:
            self._compact.store_copies()
        first_count, *other_counts = [self._step_count(tensor) for tensor in self._masters]
        for count in other_counts:
            if count is not None and first_count is not None:
                count.copy_(first_count)
        self.sharded_parameters.sync_parameters()

    def close(self) -> None:
        """Remove the files of states on disk, of which nothing is left."""
        if self.states is not None:
            self.states.close()

    def _step_count(self, master: Tensor) -> Tensor | None:
        return (self._compact.state[master] if self._compact else self._optimizer_state(master)).get("step")

    def drop_copies(self) -> None:
        """Free the copies that `state()` decoded."""
        if self._compact:
            self._compact.drop_copies()

    def _optimizer_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if self._compact:
            return self._compact.state_copies(parameter)
        moments: dict[str, Any] = self._optimizer.state[parameter]
        if self._settings.name == "adamw" and not moments:
            moments["step"] = float32_zero(parameter.device)
            moments.update(self._new_moments(parameter))
        if self._settings.name == "sgd" and self._settings.momentum and not moments:
            # torch sets the buffer to the first gradient; from zero, momentum x 0 + gradient is the same.
            moments.update(self._new_moments(parameter))
        return {kind: value for kind, value in moments.items() if isinstance(value, Tensor)}

    def _new_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of a master, which are zero, in the memory that it lies in."""
        kinds = self._settings.moment_kinds
        if self.states is None or not self.sharded_parameters.optimizer_groups:
            return {kind: torch.zeros_like(parameter) for kind in kinds}
        index = next(index for index, master in enumerate(self._masters) if master is parameter)
        return self.states.moments(index, kinds)


def _let_pass(indices: Collection[int]) -> None:
    """No save is under way."""


def piece_update(
    settings: OptimizerSettings, group: dict[str, Any], step: Tensor | None, *, is_exact: bool
) -> ElementwiseUpdate:
    """The update of consecutive elements of a master, with the bits of an update of all of them: by torch's fused
    kernels, or with `is_exact` by operations on elements. `step` is the number of updates so far, if they are counted.
    """
    if is_exact:
        return elementwise_update(settings, group, 0.0 if step is None else step.item() + 1)
    rate, decay = group["lr"], group["weight_decay"]

    def adamw_piece(master: Tensor, gradient: Tensor, moments: Sequence[Tensor]) -> None:
        assert step is not None
        (mean, square), (beta1, beta2) = moments, settings.betas
        options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "lr": rate, "weight_decay": decay}
        options |= {"eps": settings.eps, "amsgrad": False, "maximize": False}
        adamw([master], [gradient], [mean], [square], [], [step.clone()], fused=True, **options)

    def sgd_piece(master: Tensor, gradient: Tensor, moments: Sequence[Tensor]) -> None:
        options: dict[str, Any] = {"weight_decay": decay, "momentum": settings.momentum, "lr": rate}
        options |= {"dampening": 0.0, "nesterov": settings.nesterov, "maximize": False}
        buffers: list[Tensor | None] = [*moments] or [None]
        sgd([master], [gradient], buffers, fused=True, **options)

    return adamw_piece if settings.name == "adamw" else sgd_piece


def make_torch_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    rate, momentum, nesterov = settings.learning_rate, settings.momentum, settings.nesterov
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, fused=True)
