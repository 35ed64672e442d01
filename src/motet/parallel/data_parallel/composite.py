"""The trainable parameters of a rank: an engine for each sync group that the rank is in, used as one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.collectives.cost.alpha_beta import RankGroups
from motet.memory.tiers.optimizer_states import HostStates
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.comm_units import SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationGroups,
    CommunicationSettings,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh, make_meshes
from motet.parallel.data_parallel.flat_parameters import LocalShard, MasterUpdate, ParameterGradientSum
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.parallel.process.process_group import RankGroup
from motet.precision.recipe import PrecisionRecipe

# Executes the actions of the units of one sync group.
DataParallelEngine = BucketedDataParallel | FSDP2DataParallel


class CompositeDataParallel:
    """The engines of a rank, in the order of the plan: every rank starts their collectives in this order."""

    def __init__(
        self,
        engines: Sequence[DataParallelEngine],
        rank: int,
        *,
        no_elements: Tensor,
        states: HostStates | None = None,
    ) -> None:
        """`no_elements` is an empty tensor of the device, like the masters; `states` has masters of the host."""
        self.engines, self.no_elements, self._states = tuple(engines), no_elements, states
        # Fetches updates that other processes do, such as servers.
        self.fetch_updates: Callable[[], None] = lambda: None
        counted_names = [engine.plan.counted_names(rank) for engine in engines]
        self._counted = [pair for pair in zip(engines, counted_names, strict=True) if pair[1]]
        self.optimizer_groups = [group for engine in engines for group in engine.optimizer_groups]
        self.replaced_parameters = frozenset[str]().union(*(engine.replaced_parameters for engine in engines))
        self.needs_even_microbatches = any(engine.needs_even_microbatches for engine in engines)
        self.updates_on_arrival = any(engine.updates_on_arrival for engine in engines)
        self.counted_names = frozenset[str]().union(*counted_names)

    @property
    def updates_in_forward(self) -> bool:
        """Whether masters are updated while the next forward computes."""
        return self.updates_on_arrival or bool(self._states and self._states.overlaps)

    @property
    def local_masters(self) -> list[Tensor]:
        """The master parameters that this rank updates."""
        if self._states is not None:
            self._states.refresh()
        return [master for engine in self.engines for master in engine.local_masters]

    def set_optimizer(self, update_masters: MasterUpdate) -> None:
        """Let the update actions call the optimizer, with gradients by the indices of `local_masters`."""
        for engine, (start, _) in zip(self.engines, self._ranges(), strict=True):
            engine.update_masters = partial(_update_offset, start=start, update_masters=update_masters)

    def let_update_cast(self) -> list[Tensor | None]:
        """Leave it to the update to write each master to the elements that compute, which are returned; None where
        masters are these elements, or are cast when they are gathered."""
        targets = list[Tensor | None]()
        for engine in self.engines:
            if isinstance(engine, BucketedDataParallel):
                engine.update_casts = True
                targets += engine.flat_parameters.cast_targets()
            else:
                targets += [None] * len(engine.local_masters)
        return targets

    def begin_step(self) -> None:
        for engine in self.engines:
            engine.begin_step()

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        """Begin the backward of a micro-batch, which is the first or last of the step."""
        for engine in self.engines:
            engine.begin_backward(is_first, is_last)

    def end_backward(self) -> None:
        """Complete the reductions of this backward."""
        for engine in self.engines:
            engine.end_backward()

    def engines_of(self, *stages: int) -> list[DataParallelEngine]:
        """The engines of the parameters that exactly these stages of a pipeline hold."""
        return [engine for engine in self.engines if engine.plan.group.stages == stages]

    def keeps_gradients(self, stage: int) -> bool:
        """Whether the gradients of a stage stay whole on this rank until the last backward of a step."""
        engines = (engine for engine in self.engines if stage in engine.plan.group.stages)
        return all(isinstance(engine, BucketedDataParallel) and engine.keeps_gradients for engine in engines)

    @property
    def gradient_sums(self) -> dict[Tensor, ParameterGradientSum]:
        """Sums of gradients to which products of matrices can be added, by parameter."""
        buckets = (engine for engine in self.engines if isinstance(engine, BucketedDataParallel))
        return {parameter: each for engine in buckets for parameter, each in engine.gradient_sums.items()}

    def local_gradients(self) -> list[Tensor]:
        """The gradients of the masters, in the dtype of the sums."""
        return [gradient for engine in self.engines for gradient in engine.local_gradients()]

    def counted_gradients(self) -> list[Tensor]:
        """This rank's shards of the sums that it counts in the norm."""
        return [tensor for engine, names in self._counted for tensor in engine.reduced_gradients(names)]

    def reduced_shards(self) -> dict[str, LocalShard]:
        """This rank's shards of the sums of gradients, by the names of parameters."""
        return {name: shard for engine in self.engines for name, shard in engine.reduced_shards().items()}

    def update(self) -> None:
        """Update the masters, and let every rank compute with the result."""
        self.fetch_updates()
        for engine in self.engines:
            engine.update()

    def gather_parameters(self) -> None:
        """Let every rank compute with the values that each has got from its host."""
        for engine in self.engines:
            engine.gather_parameters()

    def expect_values(self) -> None:
        """Let modules wait for the values that the host sends while the next forward computes."""
        for engine in self.engines:
            engine.expect_values()

    @property
    def update_order(self) -> list[int] | None:
        """The indices of `local_masters` in the order in which forwards use their values; None before the first."""
        first_uses = [engine.first_uses for engine in self.engines]
        if any(uses is None for uses in first_uses):
            return None
        times = [time for uses in first_uses for time in uses or ()]
        return sorted(range(len(times)), key=times.__getitem__)

    def sync_parameters(self) -> None:
        """Let every rank compute with the masters after they were written to."""
        self.fetch_updates()
        for engine in self.engines:
            engine.sync_parameters()

    def load_assigned_values(self) -> None:
        """Continue from values that were assigned to parameters, on all ranks alike."""
        for engine in self.engines:
            engine.load_assigned_values()

    def wait_for_pending(self) -> None:
        """Wait until parameters and masters have the values of the last update."""
        self.fetch_updates()
        for engine in self.engines:
            engine.wait_for_pending()

    def wrap_as_forward(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, in which parameters of the module may be used outside of its forward."""
        for engine in self.engines:
            compute = engine.wrap_as_forward(compute)
        return compute

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        """The shards of parameters in `tensors`, one for each master, by name."""
        pairs = zip(self.engines, self._ranges(), strict=True)
        return {
            name: shard
            for engine, (start, stop) in pairs
            for name, shard in engine.local_shards(tensors[start:stop]).items()
        }

    def unfilled_shards(self) -> Iterator[tuple[str, LocalShard]]:
        """Local tensors that need initial values, by the names of parameters."""
        return (pair for engine in self.engines for pair in engine.unfilled_shards())

    def _ranges(self) -> Iterator[tuple[int, int]]:
        start = 0
        for engine in self.engines:
            stop = start + len(engine.optimizer_groups)
            yield start, stop
            start = stop


def _update_offset(gradients: Mapping[int, Tensor], *, start: int, update_masters: MasterUpdate) -> None:
    update_masters({start + index: gradient for index, gradient in gradients.items()})


def make_data_parallel_engines(
    module: nn.Module,
    plans: Sequence[SyncGroupPlan],
    recipe: PrecisionRecipe,
    *,
    group: RankGroup,
    settings: CommunicationSettings,
    states: HostStates | None = None,
) -> CompositeDataParallel:
    """Shard the parameters of a module as the plans say; every rank that takes the step calls this. `states` has the
    masters, if the host updates them."""
    parameters = dict(module.named_parameters())
    engines: list[DataParallelEngine] = []
    for plan, mesh in zip(plans, _meshes(plans, group=group, settings=settings), strict=True):
        if mesh is not None:
            make_engine = FSDP2DataParallel if plan.group.unit_kind == "rows" else BucketedDataParallel
            kind: dict[str, Any] = {"recipe": recipe, "mesh": mesh, "settings": settings, "states": states}
            engines.append(make_engine(module, parameters, plan, **kind))
    no_elements = torch.zeros(0, dtype=getattr(torch, recipe.master), device=group.device)
    return CompositeDataParallel(engines, group.rank, no_elements=no_elements, states=states)


def _meshes(
    plans: Sequence[SyncGroupPlan], *, group: RankGroup, settings: CommunicationSettings
) -> list[ShardReplicaMesh | None]:
    """The process groups of each sync group, or None if this rank is not in it.

    Those of sync groups without a common rank, such as those of several stages, are made together.
    """
    keys = [(plan.group.sum_groups, resolve_communication_groups(settings, plan.group.sharding)) for plan in plans]
    together: list[tuple[CommunicationGroups, set[int], list[RankGroups]]] = []
    for sum_groups, comm_groups in dict.fromkeys(keys):
        ranks = {rank for each in sum_groups for rank in each}
        fitting = (each for each in together if each[0] == comm_groups and each[1].isdisjoint(ranks))
        batch = next(fitting, None)
        if batch is None:
            together.append(batch := (comm_groups, set(), []))
        batch[1].update(ranks)
        batch[2].append(sum_groups)
    meshes: dict[tuple[RankGroups, CommunicationGroups], ShardReplicaMesh | None] = {}
    for comm_groups, _, members in together:
        mesh = make_meshes(group, tuple(ranks for each in members for ranks in each), comm_groups)
        for sum_groups in members:
            is_member = any(group.rank in ranks for ranks in sum_groups)
            meshes[sum_groups, comm_groups] = mesh if is_member else None
    return [meshes[key] for key in keys]
