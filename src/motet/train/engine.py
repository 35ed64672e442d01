"""A module that is spread over ranks, in a loop of one's own: `parallelize` it, then `step`, or do the parts of a step.

The training of jobs goes the same way (train/step.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.collectives.execute.api import all_reduce, sum_scalars
from motet.core.base_settings import FrozenSettings
from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.core.trace import span
from motet.models.user_module import check_parameters
from motet.parallel.data_parallel.bucketed_zero import (
    broadcast_buffers,
    broadcast_parameters_and_buffers,
    persistent_buffers,
)
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    check_communication,
    without_forward_overlap,
)
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.parallel.layout import Layout, LayoutSettings, parse_layout, resolve_layout
from motet.parallel.local_sgd.outer_optimizer import OuterOptimizer, OuterStepStatus, split_into_replicas
from motet.parallel.local_sgd.schedule import LocalSGDSettings
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import check_same_on_all_ranks, described
from motet.parallel.reproducible.exact_norm import exact_sum
from motet.parallel.step_plan.check import check_rank_matches_plan, prove_collective_programs, prove_step_plan
from motet.parallel.step_plan.plan import make_step_plan
from motet.precision.cast_frozen import cast_frozen_parameters
from motet.precision.recipe import RECIPES, PrecisionRecipe, PrecisionSettings
from motet.train.idle import refuse_idle
from motet.train.optimizer import Updater, make_updater, parameters_of
from motet.train.settings import OptimizerSettings
from motet.train.state import RunState, newest_checkpoint

SettingsOf = TypeVar("SettingsOf", bound=FrozenSettings)
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]
"""(module, batch) -> the sum of the losses and how many there are; or their mean, and then every batch counts alike."""


@dataclass(frozen=True)
class Update:
    """How a step ended. The same on every rank of a replica; without `outer`, these are all ranks."""

    loss: float
    """Per count: the mean over all ranks and micro-batches."""
    grad_norm: float
    """Before clipping."""
    count: float
    finite: bool
    """False: the loss or a gradient is not finite, and nothing was updated."""
    sums: tuple[float, ...]
    """Of whatever else was to be added up over the ranks."""
    stop: bool
    """Some rank was asked to stop; with `outer`, replicas learn it when they meet."""
    skipped: int
    """Steps in a row that updated nothing; with `outer`, the most of any replica, and 0 when they do not meet."""


@dataclass
class Engine:
    """A module, its optimizer, and the ranks that train it together."""

    module: nn.Module
    updater: Updater
    group: RankGroup
    clip_norm: float | None = None
    loss: Loss | None = None
    learning_rate: float = 0.0
    """What `step` takes when it is given none."""
    outer: OuterOptimizer | None = None
    """Replicas train apart, and meet by its rule."""
    reproducible: bool = False
    """Every layout is to have the same bits."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """As the step began with them, on all ranks alike."""
    _skipped: int = 0

    def __post_init__(self) -> None:
        self._trained = self._trainable()

    @property
    def peers(self) -> RankGroup:
        """The ranks that take a step together."""
        return self.group if self.outer is None else self.outer.replicas.mesh.shard_group

    def step(self, *batches: Any, learning_rate: float | None = None) -> Update:
        """One update from this rank's micro-batches; a rank may have fewer than others."""
        if self.loss is None:
            raise InputError("step: there is no loss; give parallelize a loss=..., or use begin, backward and update")
        self.begin()
        total, count, most = 0.0, 0.0, self._most(len(batches))
        for number in range(most):
            value: Tensor | None = None
            if number < len(batches):
                value, share = loss_and_count(self.loss(self.module, batches[number]))
                total, count = total + float(value.detach()), count + float(share)
            self.backward(value, number == 0, number == most - 1)
        return self.update(self.learning_rate if learning_rate is None else learning_rate, total, count)

    def begin(self) -> None:
        """Of a step."""
        now = self._trainable()
        if other := now.keys() ^ self._trained.keys():
            name = next(named[key] for named in (now, self._trained) for key in named if key in other)
            raise InputError(
                f"parameter {name} was replaced, added, frozen or released after the module was parallelized; do that "
                "before, and change values in place afterwards"
            )
        broadcast_buffers(self.module, self.peers)
        self.buffers = {name: buffer.clone() for name, buffer in persistent_buffers(self.module).items()}
        self.updater.spread.begin_step()

    def backward(self, loss: Tensor | None, first: bool = True, last: bool = True) -> None:
        """Of the sum of the losses of a micro-batch; None where this rank has none. Ranks must agree on the last."""
        self.updater.spread.begin_backward(first, last)
        with span("backward"):
            if loss is not None:
                loss.backward()
        self.updater.spread.end_backward()

    def update(
        self, learning_rate: float, loss: float | Sequence[float], count: float, *others: float, stop: bool = False
    ) -> Update:
        """Divide what was summed by the count over all ranks, clip, and update, unless something is not finite.

        `loss`: summed on this rank, or in as many parts as on all others; parts are added up in the end, exactly.
        """
        peers = self.peers
        self._refuse_changed_buffers()
        parts = loss if isinstance(loss, Sequence) else [loss]
        with span("norm"):
            squares = self.updater.squares()
        with span("agree"):
            given = [count, squares, float(stop), *parts, *others]
            count, squares, stops, *sums = sum_scalars(given, peers, peers.device)
            total = exact_sum(sums[: len(parts)])
        with span("clip"):
            divisor = count if count > 0 else 1.0  # a step without anything to learn from has loss and gradient zero
            norm = math.sqrt(squares) / divisor
            finite = math.isfinite(total) and math.isfinite(norm)
            if finite:
                self.updater.scale_gradients(self.scale_of(norm, count))
        with span("update"):
            if finite:
                self.updater.update(learning_rate)
            else:
                for name, buffer in persistent_buffers(self.module).items():
                    buffer.data.copy_(self.buffers[name])
        agreed = self._advance(finite, stops > 0)
        others = tuple(sums[len(parts) :])
        return Update(total / divisor, norm, count, finite, others, agreed.stop_requested, agreed.max_consecutive_skips)

    def scale_of(self, norm: float, count: float) -> float:
        """What sums of gradients are multiplied by to be the clipped gradient of the mean."""
        clipped = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        return clipped / count if count > 0 else clipped

    def finish(self) -> OuterStepStatus | None:
        """After the last step of all: with `outer`, the replicas meet once more and are one model then."""
        return None if self.outer is None else self.outer.finish()

    def settle(self) -> None:
        """Until the module is what the last step made it: with `overlap = "forward"` some of it may be underway."""
        self.updater.spread.wait_for_pending()

    def adopt(self) -> None:
        """Train on from values that you have assigned to parameters, on all ranks alike, since the last step.

        With masters of a higher precision than the model's, or after `p.data = ...`, they would be lost otherwise.
        """
        if self.outer is not None:
            raise InputError(
                "adopt: replicas that train apart (outer.every) would take it for something that they have learned; "
                "assign values before parallelize"
            )
        self.updater.spread.load_assigned_values()

    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the module is the same on all ranks: with `outer`, what the replicas agreed on last."""
        self.settle()
        return nullcontext() if self.outer is None else self.outer.using_outer_parameters()

    def _advance(self, finite: bool, stop: bool) -> OuterStepStatus:
        """What is known after the step."""
        if self.outer is not None:
            with span("meet"):
                return self.outer.advance(finite, stop) or OuterStepStatus(False, 0)
        self._skipped = 0 if finite else self._skipped + 1
        return OuterStepStatus(stop, self._skipped)

    def _refuse_changed_buffers(self) -> None:
        """A buffer that follows what one rank computes follows the layout."""
        if not self.reproducible:
            return
        for name, buffer in persistent_buffers(self.module).items():
            if not torch.equal(buffer, self.buffers[name]):
                raise InputError(
                    f"run.reproducible = 'layout', but training changes the buffer {name!r} (running statistics, say), "
                    "which follows what a rank has computed; use a model without such buffers, or leave "
                    "run.reproducible out"
                )

    def save(self, folder: str | Path, step: int) -> Path:
        """Write a checkpoint, which any layout can read; called by every rank."""
        return self._state(folder).save(step)[0]

    def restore(self, folder: str | Path) -> int:
        """Read the newest checkpoint of the folder; the step after which it was written, or 0 if there is none."""
        newest = newest_checkpoint(Path(folder))
        return self._state(folder).restore(newest)[0] if newest else 0

    def _state(self, folder: str | Path) -> RunState:
        return RunState(
            self.module, self.updater, self.group, Path(folder), keep=2**31, data_fingerprint="", outer=self.outer
        )

    def _trainable(self) -> dict[object, str]:
        """Each parameter, and its name. Of what stage 3 cuts into rows modules have another one while it is whole."""
        spread = self.updater.spread
        cut = spread.sharded_parameters if isinstance(spread, FSDP2DataParallel) else {}
        return {n if n in cut else p: n for n, p in self.module.named_parameters() if p.requires_grad}

    def _most(self, batches: int) -> int:
        """The most micro-batches of any rank: those that have fewer take part in the sums all the same."""
        bounds = torch.tensor([batches, -batches], device=self.peers.device)
        all_reduce(bounds, self.peers, op="max")
        most, fewest = int(bounds[0]), -int(bounds[1])
        if fewest < max(1, most) and isinstance(self.updater.spread, FSDP2DataParallel):
            raise InputError(
                f"step: a rank has {fewest} micro-batches and another {most}; at stage 3 every rank runs "
                "forward equally often, and at least once, so give all of them as many or use zero=2"
            )
        return max(1, most)


def parallelize(  # noqa: PLR0913  # sections of a job, by name
    module: nn.Module,
    layout: str | LayoutSettings = "",
    *,
    loss: Loss | None = None,
    optimizer: Mapping[str, Any] | OptimizerSettings | None = None,
    precision: str = "fp32",
    communication: Mapping[str, Any] | CommunicationSettings | None = None,
    outer: Mapping[str, Any] | LocalSGDSettings | None = None,
) -> Engine:
    """Spread a module over the ranks of the process group, as a layout like "zero=2 shard_group=4" says.

    `optimizer`, `communication` and `outer` are the sections of a job of these names. Without a process group it is
    one rank.
    """
    settings = layout if isinstance(layout, LayoutSettings) else parse_layout(layout)
    if settings.uses_server_processes:
        raise InputError(
            f"layout.data = {settings.data!r} is for `motet train`, which starts the servers; in a loop of your own "
            "leave it out"
        )
    how = _settings(OptimizerSettings, optimizer, "optimizer")
    if "schedule" in how.model_fields_set:
        raise InputError("optimizer.schedule has no effect in a loop of your own; give step a learning_rate=...")
    manner = _settings(CommunicationSettings, communication, "communication")
    meeting = _settings(LocalSGDSettings, outer, "outer")
    sections = Sections(settings, how, manner, meeting)
    refuse_idle(sections, "parallelize")
    recipe = RECIPES[_settings(PrecisionSettings, {"recipe": precision}, "precision").recipe]
    group = _group(module)
    resolved = resolve_layout(settings, group.world, group.world * settings.microbatches)
    check_communication(manner, resolved, independent_replicas=meeting.every is not None)
    check_same_on_all_ranks([f"precision = {precision!r}", *sections.lines(), *described(module)], group)
    broadcast_parameters_and_buffers(module, group)
    cast_frozen_parameters(module, recipe)
    updater, outside = make_updaters(
        module, recipe, group, resolved, Manner(how, manner, meeting), group.world * settings.microbatches
    )
    _SPREAD.update(module.modules())
    return Engine(module, updater, group, how.clip_norm, loss, how.learning_rate, outside)


_SPREAD: WeakSet[nn.Module] = WeakSet()
"""What was parallelized."""


class Sections(NamedTuple):
    """What is set."""

    layout: LayoutSettings
    optimizer: OptimizerSettings
    communication: CommunicationSettings
    outer: LocalSGDSettings

    def lines(self) -> list[str]:
        """One for each setting."""
        named = zip(self._fields, self, strict=True)
        return [f"{section}.{key} = {value!r}" for section, settings in named for key, value in settings]


class Manner(NamedTuple):
    """The sections of a job that say how parameters are updated."""

    optimizer: OptimizerSettings
    communication: CommunicationSettings
    outer: LocalSGDSettings


def make_updaters(
    module: nn.Module, recipe: PrecisionRecipe, group: RankGroup, layout: Layout, manner: Manner, batch_sequences: int
) -> tuple[Updater, OuterOptimizer | None]:
    """Spread the trainable parameters, over all ranks or over those of each replica that trains apart.

    What will be done is proven first: by the first rank for all, and then by each rank that it keeps what it should.
    """
    communication, apart = manner.communication, manner.outer.every is not None
    plan = make_step_plan(
        parameters_of(module, manner.optimizer), layout, recipe, communication, batch_sequences, apart
    )
    if group.rank == 0:
        prove_step_plan(plan)
        prove_collective_programs(layout, without_forward_overlap(communication) if apart else communication)
    replicas = split_into_replicas(group, layout, communication) if apart else None
    ranks, own = replicas.local_group_and_layout if replicas else (group, layout)
    updater = make_updater(module, manner.optimizer, recipe, ranks, own, communication)
    spread = updater.spread
    kept = {
        name: (p.start, p.start + p.values.numel()) for name, p in spread.local_shards(spread.local_masters).items()
    }
    check_rank_matches_plan(plan, ranks.rank, kept, spread.contributes_to_norm)
    return updater, OuterOptimizer(module, spread, replicas, manner.outer, communication) if replicas else None


def loss_and_count(found: Any, who: str = "step") -> tuple[Tensor, float]:
    """Of what a loss function gives; the count is 1 where it gives none."""
    value, count = found if isinstance(found, tuple) and len(found) == 2 else (found, 1.0)
    for name, each, kinds in (("loss", value, Tensor), ("count beside the loss", count, Tensor | float | int)):
        if not isinstance(each, kinds) or (isinstance(each, Tensor) and each.numel() != 1):
            what = f"of shape {list(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise InputError(
                f"{who}: the {name} is {what}; give a tensor of one number, their sum say, and how many there are"
            )
    if not value.requires_grad:
        raise InputError(
            f"{who}: the loss depends on no parameter that is trained (it was detached, or made under no_grad); return "
            "what autograd can follow"
        )
    return value, float(count)


def _settings(kind: type[SettingsOf], given: Mapping[str, Any] | SettingsOf | None, name: str) -> SettingsOf:
    return given if isinstance(given, kind) else settings_from_dict(kind, dict(given or {}), name)


def _group(module: nn.Module) -> RankGroup:
    """The ranks of the process group, on the device where the module is."""
    places = {str(p.device): name for name, p in module.named_parameters()}
    if len(places) > 1:
        found = ", ".join(f"{name} on {place}" for place, name in places.items())
        raise InputError(f"the parameters of the module are on several devices ({found}); move it to one")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("the module has no parameter that requires a gradient; there is nothing to train")
    if any(inner in _SPREAD for inner in module.modules()):
        raise InputError("the module, or a part of it, is parallelized already; go on with the engine that it has")
    check_parameters({name: p for name, p in module.named_parameters() if p.requires_grad}, "parallelize")
    device = next(module.parameters()).device
    if not dist.is_initialized():
        return RankGroup(0, 1, None, device)
    return RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, device)
