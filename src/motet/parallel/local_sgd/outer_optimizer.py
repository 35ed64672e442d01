"""Local SGD and DiLoCo: replicas take steps independently, and an outer optimizer merges them now and then.

    outer parameters   the result of the last outer step; the same bits on every replica
    pseudo-gradient    outer parameters - masters; its mean over replicas is the outer optimizer's gradient
    merged             masters := outer parameters; after a delay, mix x masters + (1 - mix) x outer parameters

All are sharded like the masters, so an outer step communicates within replica groups, whatever the stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn

from motet.collectives.compression import compressed_collectives
from motet.collectives.compression.codecs import PowerSGDCodec
from motet.collectives.compression.compressed_collectives import codec_numerics, to_accumulation_dtype
from motet.collectives.execute.api import CollectiveOptions, all_gather, all_reduce, sum_scalars
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle, WorkQueue
from motet.core.errors import check_input
from motet.core.seeds import derive_seed
from motet.parallel.data_parallel.communication.communication_settings import (
    CollectiveAlgorithmSelector,
    CommunicationSettings,
    resolve_codecs,
    resolve_communication_groups,
    without_forward_overlap,
)
from motet.parallel.data_parallel.communication.shard_replica_mesh import ShardReplicaMesh, make_mesh
from motet.parallel.data_parallel.composite import CompositeDataParallel
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.local_sgd.schedule import FragmentSyncSchedule, LocalSGDSettings, split_into_fragments
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup, broadcast_buffers, new_process_group


class IndependentReplicaRanks(NamedTuple):
    """The ranks as independent replicas."""

    all_ranks: RankGroup
    mesh: ShardReplicaMesh
    full_sharding: DataParallelSharding  # Sharding of all ranks


def split_into_replicas(
    group: RankGroup, sharding: DataParallelSharding, settings: CommunicationSettings
) -> IndependentReplicaRanks:
    """Make the process groups of independent replicas; every rank of the group calls this."""
    mesh = make_mesh(group, resolve_communication_groups(without_forward_overlap(settings), sharding))
    if mesh.replica_group is group and group.world > 1:  # outer steps stay in flight during other collectives
        process_group = new_process_group(group, range(group.world))
        mesh = ShardReplicaMesh(mesh.shard_group, replace(group, process_group=process_group))
    return IndependentReplicaRanks(group, mesh, sharding)


class OuterStepStatus(NamedTuple):
    """Facts that all replicas know after an outer step."""

    stop_requested: bool  # Some rank requested it
    max_consecutive_skips: int  # Skipped steps in a row, at most over all replicas since the outer step before
    save_requested: bool = False  # Some rank requested it


class OuterOptimizer:
    """The outer optimizer of this rank's shards, which counts steps and runs the outer steps that are due."""

    def __init__(
        self,
        module: nn.Module,
        parameters: CompositeDataParallel,
        replicas: IndependentReplicaRanks,
        *,
        settings: LocalSGDSettings,
        communication: CommunicationSettings,
    ) -> None:
        assert settings.every is not None
        self._module, self._parameters, self.replicas = module, parameters, replicas
        self._schedule = FragmentSyncSchedule(settings.every, settings.fragments, settings.delay)
        self.steps, self._mixing_factor = 0, settings.mixing_factor
        averages = settings.optimizer == "average"
        self._learning_rate, self._momentum = (1.0, 0.0) if averages else (settings.learning_rate, settings.momentum)
        numels = {name: shard.shape.numel() for name, shard in self._master_shards().items()}
        sizes = {name: numels[name] for name, _ in module.named_parameters() if name in numels}
        self._fragments = split_into_fragments(sizes, settings.fragments)
        self._outer_parameters = self._copy_all_masters()
        self._reducer = PseudoGradientReducer(
            communication, replicas.full_sharding, replicas.mesh.replica_group, templates=self._outer_parameters
        )
        self._momentum_buffers = [torch.zeros_like(outer) for outer in self._outer_parameters] if self._momentum else []
        self._pending_steps: list[_PendingOuterStep] = []
        self._last_start_steps = [0] * settings.fragments  # By fragment: the step after which its outer step began
        # Skipped steps in a row: now, and at most since the last outer step.
        self._consecutive_skips = self._max_consecutive_skips = 0

    def advance(self, is_finite: bool, stop_requested: bool, save_requested: bool) -> OuterStepStatus | None:
        """Count a step, and start and finish the outer steps that are due; None when none finishes."""
        self.steps += 1
        self._consecutive_skips = 0 if is_finite else self._consecutive_skips + 1
        self._max_consecutive_skips = max(self._max_consecutive_skips, self._consecutive_skips)
        due = self._schedule.due_fragments(self.steps)
        if due:
            self._start_outer_step(due, stop_requested, save_requested)
        last_start = self.steps - self._schedule.delay
        return self._finish_outer_steps([each for each in self._pending_steps if each.start_step <= last_start])

    def finish(self) -> OuterStepStatus | None:
        """Merge all fragments after the last step, so that replicas are one model; None if they already were."""
        first = self._finish_outer_steps(self._pending_steps)
        remaining = [i for i, start_step in enumerate(self._last_start_steps) if start_step != self.steps]
        if not remaining:
            return first
        self._start_outer_step(remaining)
        second = self._finish_outer_steps(self._pending_steps)
        assert second is not None
        skips = max(first.max_consecutive_skips if first else 0, second.max_consecutive_skips)
        return OuterStepStatus(first.stop_requested if first else second.stop_requested, skips)

    @contextmanager
    def using_outer_parameters(self) -> Iterator[None]:
        """Inside, every replica has the outer parameters, with the first rank's buffers."""
        self._parameters.wait_for_pending()
        buffers = list(persistent_buffers(self._module).values())
        masters, saved = self._copy_all_masters(), [buffer.clone() for buffer in buffers]
        self._write_masters(self._outer_parameters)
        broadcast_buffers(self._module, self.replicas.all_ranks)
        try:
            yield
        finally:
            self._write_masters(masters)
            for buffer, values in zip(buffers, saved, strict=True):
                buffer.copy_(values)

    # --- checkpoint state --------------------------------------------------------------------------

    def schedule_state(self) -> dict[str, int]:
        """Numbers that must be the same for a run to resume exactly."""
        return {"replicas": self.replicas.mesh.replica_group.world} | vars(self._schedule)

    def state_by_kind(self) -> dict[str, dict[str, LocalShard]]:
        """State that all replicas share, by kind and name, as views: outer parameters, momenta, means to be merged.

        The kind of outer parameters is that of masters, so that a run without replicas resumes from them.
        """
        for pending in self._pending_steps:
            pending.finish(self.replicas)
        kinds: dict[str, Mapping[int, Tensor]] = {
            "master": dict(enumerate(self._outer_parameters)),
            "outer/momentum": dict(enumerate(self._momentum_buffers)),
            "outer/mean": {i: mean for p in self._pending_steps for i, mean in p.pseudo_gradients.items()},
        }
        return {kind: dict(self._local_shards(tensors)) for kind, tensors in kinds.items()}

    def compression_state(self) -> dict[str, LocalShard]:
        """Compression errors of this replica's pseudo-gradients, by name, as views."""
        return dict(self._local_shards(dict(enumerate(self._reducer.errors))))

    def _local_shards(self, tensors: Mapping[int, Tensor]) -> Iterator[tuple[str, LocalShard]]:
        shards = self._master_shards()
        for fragment_id, flat in tensors.items():
            names = self._fragments[fragment_id]
            for name, values in zip(names, flat.split([shards[n].values.numel() for n in names]), strict=True):
                yield name, shards[name]._replace(values=values)

    def restore_schedule(self, steps: int, stored_names: Mapping[str, object]) -> None:
        """Prepare for a state after `steps` steps to be written, from a checkpoint with these names."""
        self._restart_at(steps)
        for start_step, fragment_ids in self._schedule.in_flight(steps):
            waiting = [i for i in fragment_ids if f"outer/mean/{self._fragments[i][0]}" in stored_names]
            if waiting:
                means = {i: torch.zeros_like(self._outer_parameters[i]) for i in waiting}
                self._pending_steps.append(_PendingOuterStep(start_step, means, True, status=OuterStepStatus(False, 0)))

    def reset_from_masters(self, steps: int) -> None:
        """Begin from the current masters, which are the same on all replicas."""
        self._restart_at(steps)
        self._outer_parameters = self._copy_all_masters()

    def _restart_at(self, steps: int) -> None:
        self.steps, self._pending_steps, self._last_start_steps = steps, [], [steps] * len(self._last_start_steps)

    # --- outer steps -------------------------------------------------------------------------------

    def _start_outer_step(
        self, fragment_ids: Sequence[int], stop_requested: bool = False, save_requested: bool = False
    ) -> None:
        self._parameters.wait_for_pending()
        replicas, device = self.replicas, self.replicas.all_ranks.device
        pseudo_gradients = {i: torch.sub(self._outer_parameters[i], self._copy_masters(i)) for i in fragment_ids}
        is_nonfinite = float(not all(each.isfinite().all() for each in pseudo_gradients.values()))
        is_finite = not sum_scalars([is_nonfinite], replicas.mesh.shard_group, device)[0]
        for each in () if is_finite else pseudo_gradients.values():
            each.zero_()  # a diverged replica contributes nothing, and restarts from the outer parameters
        works = [self._reducer.start(i, each, self.steps) for i, each in pseudo_gradients.items()]
        status = [stop_requested, self._max_consecutive_skips, is_finite, save_requested]
        row = torch.tensor(status, dtype=torch.float64, device=device)
        rows = row.new_empty(replicas.all_ranks.world * len(row))
        works.append(all_gather(rows, row, replicas.all_ranks, async_op=True))
        self._pending_steps.append(_PendingOuterStep(self.steps, pseudo_gradients, is_finite, works, rows, row))
        for fragment_id in fragment_ids:
            self._last_start_steps[fragment_id] = self.steps
        self._max_consecutive_skips = 0

    def _finish_outer_steps(self, pending_steps: Sequence["_PendingOuterStep"]) -> OuterStepStatus | None:
        if not pending_steps:
            return None
        self._parameters.wait_for_pending()
        for pending in pending_steps:
            pending.finish(self.replicas)
            weight = self._mixing_factor if pending.is_locally_finite and pending.start_step < self.steps else 0.0
            for fragment_id, mean in pending.pseudo_gradients.items():
                if pending.finite_replicas:
                    self._update_outer_parameters(fragment_id, mean)
                self._write_fragment(fragment_id, self._outer_parameters[fragment_id], local_weight=weight)
        self._pending_steps = [pending for pending in self._pending_steps if pending not in pending_steps]
        self._parameters.sync_parameters()
        broadcast_buffers(self._module, self.replicas.all_ranks)
        stops, skips, saves = zip(*(pending.status for pending in pending_steps if pending.status), strict=True)
        return OuterStepStatus(any(stops), max(skips), any(saves))

    def _update_outer_parameters(self, fragment_id: int, mean: Tensor) -> None:
        """SGD with Nesterov momentum, whose gradient is the mean pseudo-gradient."""
        if self._momentum:
            mean = mean.add(self._momentum_buffers[fragment_id].mul_(self._momentum).add_(mean), alpha=self._momentum)
        self._outer_parameters[fragment_id].sub_(mean, alpha=self._learning_rate)

    def _master_shards(self) -> dict[str, LocalShard]:
        return self._parameters.local_shards(self._parameters.local_masters)

    def _copy_masters(self, fragment_id: int) -> Tensor:
        shards = self._master_shards()
        return torch.cat([shards[name].values for name in self._fragments[fragment_id]])

    def _copy_all_masters(self) -> list[Tensor]:
        return [self._copy_masters(fragment_id) for fragment_id in range(len(self._fragments))]

    def _write_masters(self, fragments: Sequence[Tensor]) -> None:
        self._parameters.wait_for_pending()
        for fragment_id, flat in enumerate(fragments):
            self._write_fragment(fragment_id, flat)
        self._parameters.sync_parameters()
        self._parameters.wait_for_pending()

    def _write_fragment(self, fragment_id: int, flat: Tensor, *, local_weight: float = 0.0) -> None:
        shards = self._master_shards()
        for name, shard in self._local_shards({fragment_id: flat}):
            if local_weight:
                shards[name].values.lerp_(shard.values, 1.0 - local_weight)
            else:
                shards[name].values.copy_(shard.values)


@dataclass(eq=False)
class _PendingOuterStep:
    start_step: int  # The step after which it began
    pseudo_gradients: dict[int, Tensor]  # By fragment; their means once it is finished
    is_locally_finite: bool  # On this replica
    works: Sequence[WorkHandle] = ()
    gathered_status: Tensor | None = None  # All ranks' (stop requested, most skipped steps in a row, is finite, save)
    local_status: Tensor | None = None  # Kept while it is sent
    status: OuterStepStatus | None = None
    finite_replicas: int = 1

    def finish(self, replicas: IndependentReplicaRanks) -> None:
        """Wait until all pseudo-gradients are summed."""
        if self.status is not None:
            return
        for work in self.works:
            work.wait()
        assert self.gathered_status is not None
        rows = self.gathered_status.view(replicas.all_ranks.world, -1).cpu()
        self.finite_replicas = int(rows[:, 2].sum().item()) // replicas.full_sharding.shards
        stop, skips, _, save = rows.max(dim=0).values.tolist()
        self.status = OuterStepStatus(stop > 0, int(skips), save > 0)
        for total in self.pseudo_gradients.values():
            total.div_(max(1, self.finite_replicas))


class PseudoGradientReducer:
    """Sums over replicas of one flat tensor for each fragment."""

    def __init__(
        self,
        settings: CommunicationSettings,
        sharding: DataParallelSharding,
        replicas: RankGroup,
        *,
        templates: Sequence[Tensor],
    ) -> None:
        codecs = resolve_codecs(settings, sharding)
        check_input(
            not isinstance(codecs.replica_gradients, PowerSGDCodec),
            f"communication.compress_gradients = {settings.compress_gradients!r} compresses matrices, but the "
            "pseudo-gradients of outer.every are flat; use another codec, or communication.compress_over=shards",
        )
        self._codec, self._replicas = codecs.replica_gradients, replicas
        self._compress_after, self._check_next_call = settings.compress_after, True
        self._algorithms = CollectiveAlgorithmSelector(without_forward_overlap(settings), sharding)
        self.errors = (
            [torch.zeros_like(to_accumulation_dtype(t)) for t in templates] if codecs.has_replica_error_feedback else []
        )
        self._work_queue = WorkQueue()
        finalize(self, self._work_queue.close)

    def start(self, fragment_id: int, tensor: Tensor, step: int) -> WorkHandle:
        """Start to sum in place. Every rank starts the same fragments in the same order."""
        algorithm = self._algorithms.program("all-reduce", "replicas", tensor.nbytes)
        options: CollectiveOptions = {"async_op": True, "algorithm": algorithm, "check": self._check_next_call}
        self._check_next_call = False
        if not tensor.numel():
            return CompletedWork()
        if self._codec is None or step <= self._compress_after or self._replicas.world == 1:
            return all_reduce(tensor, self._replicas, **options)
        task = partial(self._all_reduce_compressed, fragment_id, tensor, derive_seed(step, fragment_id, "outer"))
        if tensor.device.type == "cpu":
            return self._work_queue.submit(task)
        task()  # queued on the stream; the host continues
        return CompletedWork()

    def _all_reduce_compressed(self, fragment_id: int, tensor: Tensor, seed: int) -> None:
        assert self._codec is not None
        with codec_numerics():
            corrected = (tensor + self.errors[fragment_id]).to(tensor.dtype) if self.errors else tensor
            compressed_sum = compressed_collectives.all_reduce(corrected, self._codec, self._replicas, seed)
            if self.errors:
                error, previous = compressed_sum.error, self.errors[fragment_id]
                previous.copy_(torch.where(error.isfinite().all(), error, previous))
            tensor.copy_(compressed_sum.total)
