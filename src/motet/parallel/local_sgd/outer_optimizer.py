"""Local SGD and DiLoCo: replicas take steps on their own, and an outer optimizer makes one model of them now and then.

    anchor      what the replicas agreed on last; the same bits on every replica
    difference  anchor - master, what a replica has learned since; its mean is the outer optimizer's gradient
    merged      master := anchor after that step; after a delay, mix x master + (1 - mix) x anchor

All are kept as this rank keeps its masters, so a meeting joins the ranks that hold the same shard, whatever the stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.collectives.execute.api import WorkHandle, all_gather, sum_scalars
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    resolve_communication_groups,
    without_forward_overlap,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh, make_mesh
from motet.parallel.data_parallel.sharded_parameters import LocalShard, ShardedParameters
from motet.parallel.layout import Layout
from motet.parallel.local_sgd.pseudo_gradients import PseudoGradientReducer
from motet.parallel.local_sgd.schedule import FragmentSyncSchedule, LocalSGDSettings, split_into_fragments
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import broadcast_buffers, persistent_buffers


@dataclass(frozen=True)
class IndependentReplicas:
    """The ranks as replicas that train apart; each is a world of its own between meetings."""

    all_ranks: RankGroup
    mesh: ShardReplicaMesh
    full_layout: Layout  # Of everyone

    @property
    def count(self) -> int:
        return self.mesh.replica_group.world

    @property
    def replica_index(self) -> int:
        """The number of this rank's replica."""
        return self.mesh.replica_group.rank

    @property
    def local_group_and_layout(self) -> tuple[RankGroup, Layout]:
        """The ranks of this replica, and how they share the work of a step."""
        return self.mesh.shard_group, replace(self.full_layout, dp=self.full_layout.shards)


def split_into_replicas(group: RankGroup, layout: Layout, communication: CommunicationSettings) -> IndependentReplicas:
    """Called by every rank of the group."""
    mesh = make_mesh(group, resolve_communication_groups(without_forward_overlap(communication), layout))
    if mesh.replica_group is group and group.world > 1:  # sums may be underway while everyone agrees on something else
        mesh = ShardReplicaMesh(
            mesh.shard_group, replace(group, process_group=dist.new_group(list(range(group.world))))
        )
    return IndependentReplicas(group, mesh, layout)


class OuterStepStatus(NamedTuple):
    """What all replicas know after a meeting."""

    stop_requested: bool  # Some rank was asked to stop
    max_consecutive_skips: int  # The most steps in a row that a replica has left out since the meeting before


class OuterOptimizer:
    """The outer optimizer of this rank's shards. It counts steps, and holds the meetings that are due."""

    def __init__(
        self,
        module: nn.Module,
        parameters: ShardedParameters,
        replicas: IndependentReplicas,
        settings: LocalSGDSettings,
        communication: CommunicationSettings,
    ) -> None:
        assert settings.every is not None
        self.replicas = replicas
        self.steps = 0
        self._module, self._parameters = module, parameters
        self._schedule = FragmentSyncSchedule(settings.every, settings.fragments, settings.delay)
        self._mixing_factor = settings.mixing_factor
        averages = settings.optimizer == "average"
        self._learning_rate, self._momentum = (1.0, 0.0) if averages else (settings.learning_rate, settings.momentum)
        shards = parameters.local_shards(parameters.local_masters)
        in_order = [name for name, _ in module.named_parameters() if name in shards]
        self._fragments = split_into_fragments({n: shards[n].shape.numel() for n in in_order}, settings.fragments)
        self._outer_parameters = [self._copy_masters(number) for number in range(settings.fragments)]
        self._reducer = PseudoGradientReducer(
            communication, replicas.full_layout, replicas.mesh.replica_group, self._outer_parameters
        )
        self._momentum_buffers = (
            [torch.zeros_like(anchor) for anchor in self._outer_parameters] if self._momentum else []
        )
        self._pending_steps: list[_PendingOuterStep] = []
        self._last_start_steps = [0] * settings.fragments  # The step after which each fragment left last
        # Steps in a row that were left out: now, and at most since the last meeting.
        self._consecutive_skips = self._max_consecutive_skips = 0

    def advance(self, is_finite: bool, stop_requested: bool) -> OuterStepStatus | None:
        """Count a step, and do what is due after it. None when no meeting ends here."""
        self.steps += 1
        self._consecutive_skips = 0 if is_finite else self._consecutive_skips + 1
        self._max_consecutive_skips = max(self._max_consecutive_skips, self._consecutive_skips)
        due = self._schedule.due_fragments(self.steps)
        if due:
            self._start_outer_step(due, stop_requested)
        return self._finish_outer_steps(
            [m for m in self._pending_steps if m.start_step + self._schedule.delay <= self.steps]
        )

    def finish(self) -> OuterStepStatus | None:
        """Merge everything now, after the last step of all: replicas are one model then. None: they were already."""
        first_status = self._finish_outer_steps(self._pending_steps)
        remaining = [
            fragment_id for fragment_id, start_step in enumerate(self._last_start_steps) if start_step != self.steps
        ]
        if not remaining:
            return first_status
        self._start_outer_step(remaining, stop_requested=False)
        second_status = self._finish_outer_steps(self._pending_steps)
        assert second_status is not None
        return (
            second_status
            if first_status is None
            else OuterStepStatus(
                first_status.stop_requested,
                max(first_status.max_consecutive_skips, second_status.max_consecutive_skips),
            )
        )

    @contextmanager
    def using_outer_parameters(self) -> Iterator[None]:
        """Inside, the model of every replica is the anchor, with the first rank's buffers."""
        self._parameters.wait_for_pending()
        buffers = list(persistent_buffers(self._module).values())
        local_masters = [self._copy_masters(number) for number in range(len(self._fragments))]
        saved = [buffer.clone() for buffer in buffers]
        self._write_masters(self._outer_parameters)
        broadcast_buffers(self._module, self.replicas.all_ranks)
        try:
            yield
        finally:
            self._write_masters(local_masters)
            for buffer, values in zip(buffers, saved, strict=True):
                buffer.copy_(values)

    # --- what a checkpoint holds -------------------------------------------------------------------

    def schedule_state(self) -> dict[str, int]:
        """What must be the same for a run to go on exactly."""
        schedule = self._schedule
        return {
            "replicas": self.replicas.count, "every": schedule.every, "fragments": schedule.fragments, "delay": schedule.delay
        }  # fmt: skip

    def state(self) -> dict[str, LocalShard]:
        """What the replicas have agreed on, by name, as views: the anchors, momenta, and means that wait to be merged.

        The anchors have the names of the masters: who knows nothing of replicas takes them for the model.
        """
        for pending_step in self._pending_steps:
            pending_step.finish(self.replicas)
        tensors_by_kind: dict[str, Mapping[int, Tensor]] = {
            "master": dict(enumerate(self._outer_parameters)),
            "outer/momentum": dict(enumerate(self._momentum_buffers)),
            "outer/mean": {number: mean for m in self._pending_steps for number, mean in m.pseudo_gradients.items()},
        }
        return {
            f"{kind}/{name}": piece
            for kind, flats in tensors_by_kind.items()
            for name, piece in self._local_shards(flats)
        }

    def compression_state(self) -> dict[str, LocalShard]:
        """What compression has lost of this replica's differences, by name, as views."""
        return dict(self._local_shards(dict(enumerate(self._reducer.compression_errors))))

    def _local_shards(self, flats: Mapping[int, Tensor]) -> Iterator[tuple[str, LocalShard]]:
        """Flat tensors of fragments, cut into what this rank keeps of the parameters."""
        shards = self._parameters.local_shards(self._parameters.local_masters)
        for fragment_id, flat in flats.items():
            names = self._fragments[fragment_id]
            for name, values in zip(names, flat.split([shards[n].values.numel() for n in names]), strict=True):
                yield name, shards[name]._replace(values=values)

    def restore_schedule(self, steps: int, stored_names: Mapping[str, object]) -> None:
        """Before a state is written to: as it was after so many steps. `stored`: the names of the checkpoint."""
        self.steps, self._pending_steps, self._last_start_steps = steps, [], [steps] * len(self._last_start_steps)
        for start_step, fragment_ids in self._schedule.in_flight(steps):
            waiting = [n for n in fragment_ids if f"outer/mean/{self._fragments[n][0]}" in stored_names]
            means = {fragment_id: torch.zeros_like(self._outer_parameters[fragment_id]) for fragment_id in waiting}
            if waiting:
                self._pending_steps.append(
                    _PendingOuterStep(start_step, means, is_locally_finite=True, status=OuterStepStatus(False, 0))
                )

    def reset_from_masters(self, steps: int) -> None:
        """After masters were written to: all replicas begin there."""
        self.steps, self._pending_steps, self._last_start_steps = steps, [], [steps] * len(self._last_start_steps)
        self._outer_parameters = [self._copy_masters(number) for number in range(len(self._fragments))]

    # --- meetings ----------------------------------------------------------------------------------

    def _start_outer_step(self, fragment_ids: Sequence[int], stop_requested: bool) -> None:
        """Begin to sum the differences of these fragments, and to tell everyone how this rank stands."""
        self._parameters.wait_for_pending()
        replicas = self.replicas
        device = replicas.all_ranks.device
        pseudo_gradients = {n: torch.sub(self._outer_parameters[n], self._copy_masters(n)) for n in fragment_ids}
        is_nonfinite = float(not all(difference.isfinite().all() for difference in pseudo_gradients.values()))
        is_finite = not sum_scalars([is_nonfinite], replicas.mesh.shard_group, device)[0]
        if not is_finite:  # a replica that is lost teaches nothing, and starts again from the anchor
            for difference in pseudo_gradients.values():
                difference.zero_()
        works = [
            self._reducer.start(fragment_id, difference, self.steps)
            for fragment_id, difference in pseudo_gradients.items()
        ]
        local_status = torch.tensor(
            [stop_requested, self._max_consecutive_skips, is_finite], dtype=torch.float64, device=device
        )
        gathered_status = local_status.new_empty(replicas.all_ranks.world * len(local_status))
        works.append(all_gather(gathered_status, local_status, replicas.all_ranks, async_op=True))
        self._pending_steps.append(
            _PendingOuterStep(self.steps, pseudo_gradients, is_finite, works, gathered_status, local_status)
        )
        for number in fragment_ids:
            self._last_start_steps[number] = self.steps
        self._max_consecutive_skips = 0

    def _finish_outer_steps(self, pending_steps: Sequence["_PendingOuterStep"]) -> OuterStepStatus | None:
        """End these meetings."""
        if not pending_steps:
            return None
        self._parameters.wait_for_pending()
        for pending_step in pending_steps:
            pending_step.finish(self.replicas)
            local_weight = (
                self._mixing_factor if pending_step.is_locally_finite and pending_step.start_step < self.steps else 0.0
            )
            for fragment_id, mean in pending_step.pseudo_gradients.items():
                if pending_step.finite_replicas:
                    self._update_outer_parameters(fragment_id, mean)
                self._write_fragment(fragment_id, self._outer_parameters[fragment_id], local_weight)
        self._pending_steps = [m for m in self._pending_steps if m not in pending_steps]
        self._parameters.sync_parameters()
        broadcast_buffers(self._module, self.replicas.all_ranks)
        statuses = [meeting.status for meeting in pending_steps if meeting.status]
        return OuterStepStatus(any(a.stop_requested for a in statuses), max(a.max_consecutive_skips for a in statuses))

    def _update_outer_parameters(self, fragment_id: int, mean: Tensor) -> None:
        """SGD with Nesterov momentum, of which the mean difference is the gradient."""
        if self._momentum:
            momentum = self._momentum_buffers[fragment_id].mul_(self._momentum).add_(mean)
            mean = mean.add(momentum, alpha=self._momentum)
        self._outer_parameters[fragment_id].sub_(mean, alpha=self._learning_rate)

    def _copy_masters(self, fragment_id: int) -> Tensor:
        """Those of a fragment, one after another: a copy."""
        shards = self._parameters.local_shards(self._parameters.local_masters)
        return torch.cat([shards[name].values for name in self._fragments[fragment_id]])

    def _write_masters(self, fragments: Sequence[Tensor]) -> None:
        """Give the model of this replica these masters."""
        self._parameters.wait_for_pending()
        for fragment_id, flat in enumerate(fragments):
            self._write_fragment(fragment_id, flat)
        self._parameters.sync_parameters()
        self._parameters.wait_for_pending()

    def _write_fragment(self, fragment_id: int, flat: Tensor, local_weight: float = 0.0) -> None:
        """`keeps`: the weight of what is there."""
        shards = self._parameters.local_shards(self._parameters.local_masters)
        local_masters = [shards[name].values for name in self._fragments[fragment_id]]
        for values, new_values in zip(local_masters, flat.split([v.numel() for v in local_masters]), strict=True):
            if local_weight:
                values.lerp_(new_values, 1.0 - local_weight)
            else:
                values.copy_(new_values)


@dataclass(eq=False)
class _PendingOuterStep:
    """Of some fragments, underway or waiting to be merged."""

    start_step: int  # The step after which it began
    pseudo_gradients: dict[int, Tensor]  # Of differences, by fragment; their means once it is concluded
    is_locally_finite: bool  # This replica's differences were
    works: Sequence[WorkHandle] = ()
    # Of all ranks: asked to stop, most steps left out in a row, differences finite.
    gathered_status: Tensor | None = None
    local_status: Tensor | None = None  # This rank's; kept while it travels
    status: OuterStepStatus | None = None
    finite_replicas: int = 1  # Those that had something to say

    def finish(self, replicas: IndependentReplicas) -> None:
        """Wait until everything has come."""
        if self.status is not None:
            return
        for work in self.works:
            work.wait()
        assert self.gathered_status is not None
        rows = self.gathered_status.view(replicas.all_ranks.world, -1).cpu()
        stop, skipped = rows[:, 0].max().item(), rows[:, 1].max().item()
        self.finite_replicas = int(rows[:, 2].sum().item()) // replicas.full_layout.shards
        self.status = OuterStepStatus(stop > 0, int(skipped))
        for total in self.pseudo_gradients.values():
            total.div_(max(1, self.finite_replicas))
