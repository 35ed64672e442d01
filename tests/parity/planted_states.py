"""Mistakes in contributions of ranks, in the formulas of updates, and in state between steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from motet.collectives.execute.work_queue import CompletedWork
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.data_parallel.flat_parameters import GradientBuffer
from motet.parallel.data_parallel.fsdp import FSDP2DataParallel
from motet.train.engine import TrainingEngine
from motet.train.optimizer import sharded_optimizer
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.state import TrainingState
from parity.faults import GRADIENT, LEAVES_OUT, Patch, around, around_action, changed, fault, nothing


def _times(factor: float) -> Patch:
    return changed(GradientBuffer, "zero_missing", lambda _, buffer, number: buffer.bucket(number).mul_(factor))


@fault("dp=3 zero=0", "dp=3 zero=2", first=GRADIENT, cause="local gradient of rank 1 is wrong: it is -1 times")
def a_rank_has_the_wrong_sign(rank: int) -> Patch:
    return _times(-1.0) if rank == 1 else nothing()


@fault("dp=3 zero=0", "dp=2 zero=1", first=GRADIENT, cause="local gradient of rank 1 is wrong: it is 2 times")
def a_rank_counts_twice(rank: int) -> Patch:
    return _times(2.0) if rank == 1 else nothing()


@fault("dp=3 zero=1", "dp=4 zero=2", first=GRADIENT, cause="local gradient of rank 0 is wrong: it is 0 throughout")
def a_rank_gives_nothing(rank: int) -> Patch:
    return _times(0.0) if rank == 0 else nothing()


COPIES = "hold copies that should be equal, but differ"


@fault("dp=2 zero=0", "dp=3 zero=0", first="state master/.*", cause=f"ranks? 0.* and rank 1 {COPIES}")
def a_replica_drifts_by_one_ulp(rank: int) -> Patch:
    """No distance from one device shows it."""

    def wrong(_: None, optimizer: ShardedOptimizer, *rest: Any) -> None:
        first = next(iter(optimizer.sharded_parameters.local_masters)).view(-1)
        first[3] = torch.nextafter(first[3], torch.tensor(torch.inf, dtype=first.dtype))

    return changed(ShardedOptimizer, "update", wrong) if rank == 1 else nothing()


@fault(
    "dp=4 zero=3 secondary_group=2",
    first="used parameter backward/blocks.1",
    cause=f"ranks 0 and 1 and ranks 2 and 3 {COPIES}",
)
def a_second_copy_drifts_by_one_ulp(rank: int) -> Patch:
    def wrong(own: Any, communicator: Any, action: Any, *given: Any, **options: Any) -> Any:
        if action.over == "near":
            source = options["source"]
            source[0] = torch.nextafter(source[0], torch.full_like(source[0], torch.inf))
        return own(communicator, action, *given, **options)

    return around_action("all_gather", call=wrong) if rank == 2 else nothing()


SERVERS = "dp=3 data=parameter_server server.transport=collectives server.count=2"


@fault(SERVERS, first="parameter .*", cause="not updated")
def a_server_keeps_what_it_has_updated(rank: int) -> Patch:
    return around_action("broadcast", call=lambda *_, **__: CompletedWork())


@fault(SERVERS, first=GRADIENT, cause="contribution of rank . alone")
def a_server_hears_of_nobody(rank: int) -> Patch:
    return around_action("reduce", call=lambda *_, **__: CompletedWork())


@fault(
    "dp=4 zero=3 secondary_group=2",
    first="used parameter backward/blocks.*",
    cause="it is its value in the step before",
)
def second_copies_are_of_the_step_before(rank: int) -> Patch:
    def wrong(own: Any, communicator: Any, action: Any, unit_id: int, *given: Any, **options: Any) -> Any:
        if action.over == "near":
            stored, shard = vars(communicator).setdefault("stored", {}), options["source"]
            options["source"], stored[unit_id] = stored.get(unit_id, shard), shard.clone()
        return own(communicator, action, unit_id, *given, **options)

    return around_action("all_gather", call=wrong)


@fault(
    "dp=2 zero=0", "dp=2 zero=1", first="activation gradient embedding,", cause="no rank has a gradient of it for rows"
)
def a_tied_weight_forgets_one_of_its_uses(rank: int) -> Patch:
    def wrong(own: Any, tokens: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return own(tokens, weight.detach(), *rest, **more)

    return around(F, "embedding", wrong) if rank == 1 else nothing()


def with_groups(change: Callable[[dict[str, Any]], None]) -> Patch:
    """The optimizer is made with other numbers in its groups."""

    def wrong(optimizer: Any, *_: Any) -> Any:
        for group in optimizer.param_groups:
            change(group)
        return optimizer

    return changed(sharded_optimizer, "make_torch_optimizer", wrong)


@fault("dp=2 zero=1", "dp=2 zero=3", first="state exp_avg/.*", cause="the gradient counts 1/2 times")
def moments_have_the_betas_of_each_other(rank: int) -> Patch:
    return with_groups(lambda group: group.update(betas=group["betas"][::-1]))


@fault("dp=2 zero=2", first="state master/.*", cause="as in step 2 of the optimizer, not 1")
def the_bias_is_corrected_as_one_step_later(rank: int) -> Patch:
    def wrong(own: Any, optimizer: ShardedOptimizer, numbers: Any) -> None:
        states = [optimizer._optimizer.state[tensor] for tensor in optimizer._masters]
        for each in states:
            each["step"].add_(1) if "step" in each else None
        own(optimizer, numbers)
        for each in states:
            each["step"].sub_(1)

    return around(ShardedOptimizer, "_update_masters", wrong)


@fault("dp=2 zero=1", "dp=3 zero=3", first="state master/.*", cause="all of it counts 1/2 times")
def a_rank_has_half_the_learning_rate(rank: int) -> Patch:
    def wrong(own: Any, engine: TrainingEngine, learning_rate: float, *given: Any, **more: Any) -> Any:
        return own(engine, learning_rate / 2, *given, **more)

    return around(TrainingEngine, "update", wrong) if rank == 1 else nothing()


@fault("dp=2 zero=1", "dp=2 zero=3", first="starting parameter .*, step 3, steps in a row", cause="rounded to bfloat16")
def checkpoints_have_fewer_bits(rank: int) -> Patch:
    def wrong(own: Any, state: TrainingState, step: int) -> Any:
        for name, shard in state.tensors().items():
            if name.startswith("master/"):
                shard.values.copy_(shard.values.bfloat16())  # float32 would be promoted here
        state.optimizer.sync_parameters()
        return own(state, step)

    return around(TrainingState, "save", wrong)


@fault("dp=2 zero=0 communication.overlap=forward", first=GRADIENT, cause="no rank has it")
def a_bucket_that_arrives_late_is_not_updated(rank: int) -> Patch:
    def wrong(own: Any, parallel: BucketedDataParallel, number: int) -> None:
        updates_on_arrival = any(action.kind == "update" for action in parallel._actions_on_arrival)
        if number or not updates_on_arrival or not parallel._gather_order:
            own(parallel, number)
        elif (work := parallel._pending_gathers.pop(number, None)) is not None:
            work.wait()

    return around(BucketedDataParallel, "_wait_for_bucket", wrong)


@fault("dp=3 zero=3 microbatches=2", first=GRADIENT, cause=f"{LEAVES_OUT} micro-batch 0 of ranks 0, 1 and 2")
def stage_3_replaces_microbatches(rank: int) -> Patch:
    def wrong(_: None, parallel: FSDP2DataParallel, *flags: bool) -> None:
        for parameter in parallel.sharded_parameters.values():
            parameter.grad = None

    return changed(FSDP2DataParallel, "begin_backward", wrong)
