"""The pool of rank processes itself: results, failures, time limits, dead processes, warnings."""

import os
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup
from ranks import RankFailureError, Ranks


def imported_and_loaded(place: RankEnvironment) -> bool:
    import rank_worker
    import refusals

    return rank_worker._module(str(refusals.__file__), "refusals") is refusals is sys.modules["refusals"]


def total(group: RankGroup, value: float) -> float:
    tensor = torch.tensor([value * (group.rank + 1)])
    if group.process_group is not None:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor.item()


def identity(group: RankGroup) -> tuple[int, int, int]:
    return os.getpid(), torch.get_num_threads(), dist.get_world_size()


def where(place: RankEnvironment) -> tuple[RankEnvironment, bool]:
    return place, dist.is_initialized()


def wrong_on_one(group: RankGroup) -> None:
    if group.rank == 1:
        answer = 6 * 9
        assert answer == 42, "base thirteen"
    total(group, 1.0)


def hang_on_one(group: RankGroup) -> None:
    if group.rank == 1:
        wait_for_nothing()
    total(group, 1.0)


def wait_for_nothing() -> None:
    time.sleep(600)


def die_on_one(group: RankGroup) -> None:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(group, 1.0)


def leave_on_one(group: RankGroup) -> None:
    if group.rank == 1:
        sys.exit(0)


def warn(group: RankGroup) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def spoil_defaults(group: RankGroup) -> None:
    torch.set_default_dtype(torch.float64)


def defaults(group: RankGroup) -> tuple[torch.dtype, float]:
    return torch.get_default_dtype(), torch.rand(1).item()


@pytest.fixture
def pool(ranks: Ranks) -> Ranks:
    """The pool that all tests use: its processes are running."""
    return ranks


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_order_of_rank(pool: Ranks, world: int) -> None:
    assert pool.run(world, total, 2.0) == [world * (world + 1)] * world


def test_processes_are_reused_and_have_one_thread(pool: Ranks) -> None:
    first, second = pool.run(2, identity), pool.run(2, identity)
    assert first == second and [row[1:] for row in first] == [(1, 2), (1, 2)] and first[0][0] != first[1][0]


def test_a_place_without_a_group(pool: Ranks) -> None:
    (first, started), (second, _) = pool.run_places(2, where)
    assert (first.rank, second.rank, first.world, started) == (0, 1, 2, False)
    assert first.rendezvous == second.rendezvous


def test_state_of_one_test_does_not_reach_the_next(pool: Ranks) -> None:
    before = pool.run(2, defaults)
    pool.run(2, spoil_defaults)
    assert pool.run(2, defaults) == before and before[0][0] == torch.float32


def test_a_module_that_another_one_imported_is_not_loaded_a_second_time(pool: Ranks) -> None:
    assert pool.run_places(2, imported_and_loaded) == [True, True]


def test_a_failing_rank_tells_its_own_assertion_with_values(pool: Ranks) -> None:
    with pytest.raises(RankFailureError) as caught:
        pool.run(2, wrong_on_one)
    text = str(caught.value)
    assert text.startswith("rank 1 failed: AssertionError: base thirteen") and "assert 54 == 42" in text
    assert text.count("Traceback") == 1 and pool.run(2, total, 1.0) == [3.0, 3.0]


def test_a_hanging_rank_is_named_with_where_it_stands(pool: Ranks) -> None:
    before = pool.pids()
    with pytest.raises(RankFailureError, match="rank 0 and 1 did not end") as caught:
        pool.run(2, hang_on_one, timeout_s=1.0)
    hung, text = caught.value.args[0].split("--- rank 1 stands here")[1], str(caught.value)
    assert "in wait_for_nothing" in hung and "in hang_on_one" in hung
    assert "--- rank 0 stands here" in text and not set(before[:2]) & set(pool.pids()[:2])
    assert pool.run(2, total, 1.0) == [3.0, 3.0]


def test_a_dead_process_is_named_and_replaced(pool: Ranks) -> None:
    with pytest.raises(RankFailureError, match=r"rank 1 failed: the process ended with code -9"):
        pool.run(2, die_on_one)
    assert pool.run(2, total, 1.0) == [3.0, 3.0]
    pid = pool.pids()[0]
    os.kill(pid, signal.SIGKILL)  # between two tests
    assert pool.wait_for_death(0) == -signal.SIGKILL
    assert pool.run(2, total, 1.0) == [3.0, 3.0]


def test_leaving_early_is_a_failure(pool: Ranks) -> None:
    with pytest.raises(RankFailureError, match=r"rank 1 failed: .*sys.exit\(0\)"):
        pool.run(2, leave_on_one)


def test_warnings_are_errors(pool: Ranks) -> None:
    with pytest.raises(RankFailureError, match="UserWarning: careful"):
        pool.run(2, warn)
