"""Torch's own tests of a distributed backend, run on ranks of ours with every group made by `motet`.

Torch picks tests by the name of the backend, and does not know ours. So `motet` stands in for gloo: torch's function
through which every group is made gives one of `motet` under that name. What torch keeps for MPI is run too: it is the
all-to-all of CPU tensors, which gloo had not.

A sample is run here, and all of them with `make proof`, on 2, 3 and 4 ranks and beside Gloo. `torch_suite.json` holds
how each of them ends on 4 ranks, and the page of the backend counts them. `pytest -m proof --regenerate
tests/collectives/test_torch_suite.py` writes both anew.
"""

import contextlib
import importlib
import json
import os
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from motet.collectives.shm_backend import MotetProcessGroup
from motet.parallel.process.launch_environment import RankEnvironment
from ranks import RankFailureError, Ranks

_MODULE = "torch.testing._internal.distributed.distributed_test"
WORLD = 4  # The smallest at which torch leaves no test out for the number of ranks


def names(place: RankEnvironment) -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(_suite(WORLD)[1]))


def run(place: RankEnvironment, name: str, is_motet: bool) -> str:
    """Run one test on this rank, and return why torch leaves it out, or nothing."""
    module, suite = _suite(place.world)
    # Torch's runner looks at this before it starts ranks; the function itself does not.
    reason: str = getattr(getattr(suite, name), "__unittest_skip_why__", "")
    if reason and not reason.startswith("Only MPI supports"):
        return reason
    folder = Path(place.rendezvous.removeprefix("file://")).parent
    backend = _standing_in() if is_motet else nullcontext()
    with _surroundings(module, folder, place.world), warnings.catch_warnings(), backend:
        warnings.simplefilter("ignore")
        test = suite(name)
        test.rank, test.file_name = place.rank, str(folder / "torch-store")
        try:
            _run(module, test, name)
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as leave:
            return _why(leave)
    return ""


@contextmanager
def _surroundings(module: ModuleType, folder: Path, world: int) -> Iterator[None]:
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(exist_ok=True)
    environment = {"TEMP_DIR": str(folder), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    # Tests of groups that are a part of the ranks are left out below 8 ranks, except for MPI; they need 3.
    environment |= {"BACKEND": "mpi", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    with mock.patch.dict(os.environ, environment), pytest.MonkeyPatch.context() as patch:
        dist.set_debug_level_from_env()
        patch.setattr(module, "INIT_METHOD", f"file://{folder}/init_dir/store")
        patch.setattr(module.Barrier, "barrier_id", 0)
        # Torch asks the profiler for events of backends of which it knows that they name their collectives there.
        patch.setattr(module, "PROFILING_SUPPORTED_BACKENDS", [])
        patch.setattr(module, "SEND_RECV_PROFILING_SUPPORTED_BACKENDS", [])
        yield


def _run(module: ModuleType, test: Any, name: str) -> None:
    timeout = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout))
    world = int(test.world_size)
    dist.init_process_group("gloo", init_method=test.init_method, rank=test.rank, world_size=world, timeout=timeout)
    try:
        test._barrier()
        importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
        getattr(test, name)()
        test._barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _standing_in() -> Iterator[None]:
    make = distributed_c10d._new_process_group_helper

    def helper(size: int, rank: int, members: list[int], backend: str, *rest: Any, **named: Any) -> Any:
        assert backend in ("gloo", "undefined"), backend
        made, store = make(size, rank, members, "cpu:motet", *rest, **named)
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            assert isinstance(made, MotetProcessGroup), made
            distributed_c10d._world.pg_map[made] = ("gloo", store)
        return made, store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", helper)
        yield


def _why(leave: SystemExit) -> str:
    for skip in importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS.values():
        if skip.exit_code == leave.code:
            return str(skip.message)
    raise leave


def _suite(world: int) -> tuple[ModuleType, Any]:
    """Torch's module, which reads the environment when it is imported, and its tests as a class."""
    module = _module_for(world)
    sys.modules[_MODULE] = module  # By which its classes are pickled
    return module, type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


@cache
def _module_for(world: int) -> ModuleType:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), INIT_METHOD="file://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules.pop(_MODULE, None)
        return importlib.import_module(_MODULE)


FILE = Path(__file__).with_name("torch_suite.json")
PAGE = Path(__file__).parents[2] / "docs/reference/backend-motet.md"
OUTCOMES: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
PASSES, FAILS, LEFT_OUT = "passes", "does not pass", "left out: "
SENTENCE = "expects the words of Gloo on the ranks to which rank 0 did not answer; ours say the same in others"
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "expects that DDP logs the backend as `gloo`; it logs `motet`",
    "test_monitored_barrier_failure_order": SENTENCE,
    "test_monitored_barrier_gloo": SENTENCE,
}
SAMPLE_NAMES = """
    all_gather_coalesced_complex all_gather_group all_reduce_coalesced_group_sum
    all_reduce_full_group_max all_reduce_product all_reduce_sum_async all_reduce_sum_complex
    all_to_all_single_unequal_split_group barrier_timeout_full_group broadcast_group destroy_full_group
    gather_object_subgroup grads_same_across_ranks_with_no_sync isend monitored_barrier_wait_all_ranks
    reduce_group_product scatter_complex send_recv_any_source sparse_all_reduce_sum
"""
SAMPLE = [f"test_{name}" for name in SAMPLE_NAMES.split()]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def outcome(ranks: Ranks, name: str, world: int = WORLD) -> str:
    try:
        reasons = set(ranks.run_places(world, run, name, True))
    except RankFailureError as failure:
        if name in EXCEPTIONS and " failed: AssertionError: " in str(failure):
            return FAILS
        raise
    assert len(reasons) == 1, reasons
    reason = reasons.pop()
    return f"{LEFT_OUT}{reason}" if reason else PASSES


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(four: Ranks, name: str) -> None:
    assert outcome(four, name) == PASSES


@pytest.mark.proof
@pytest.mark.parametrize("world", [2, 3, WORLD])
@pytest.mark.parametrize("name", OUTCOMES)
def test_each(four: Ranks, name: str, world: int) -> None:
    """None fails that passes on Gloo. One that begins to pass is told as well; fewer ranks leave out more."""
    try:
        end = outcome(four, name, world)
    except RankFailureError:
        with contextlib.suppress(RankFailureError):
            if set(four.run_places(world, run, name, False)) == {""}:
                raise
        assert world < WORLD  # The page speaks of as many
        return
    assert end == OUTCOMES[name] or (world < WORLD and end.startswith((PASSES, LEFT_OUT)))


@pytest.mark.proof
def test_no_test_of_torch_is_missing(four: Ranks, regenerate: bool) -> None:
    names_of_torch = four.run_places(1, names)[0]
    if regenerate:
        found = {name: outcome(four, name) for name in names_of_torch}
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        start, _, end = parts(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(start + counted(found) + end, encoding="utf-8")
    assert names_of_torch == list(json.loads(FILE.read_text(encoding="utf-8")))


def test_each_that_does_not_pass_has_a_reason_and_the_page_counts_them() -> None:
    assert {name for name, end in OUTCOMES.items() if end == FAILS} == set(EXCEPTIONS)
    assert {OUTCOMES[name] for name in SAMPLE} == {PASSES}
    assert parts(PAGE.read_text(encoding="utf-8"))[1] == counted(OUTCOMES)


def parts(page: str) -> tuple[str, str, str]:
    start, mark, rest = page.partition("<!-- counted -->\n")
    middle, other, end = rest.partition("<!-- end -->\n")
    return start + mark, middle, other + end


def counted(outcomes: dict[str, str]) -> str:
    ends = Counter(outcomes.values())
    left = {end.removeprefix(LEFT_OUT): n for end, n in ends.most_common() if end.startswith(LEFT_OUT)}
    run = ends[PASSES] + ends[FAILS]
    lines = [
        f"Of the {len(outcomes)} tests {run} can be run, and {ends[PASSES]} of these pass "
        f"({100 * ends[PASSES] / run:.1f} %); the sample has {len(SAMPLE)}. "
        f"{sum(left.values())} are left out by torch.",
        *("", "| does not pass | because it |", "|---|---|"),
        *(f"| `{name}` | {reason} |" for name, reason in EXCEPTIONS.items()),
        *("", "| torch's reason to leave tests out | tests |", "|---|---|"),
        *(f"| {reason.replace('{', '').replace('}', '')} | {n} |" for reason, n in left.items()),
    ]
    return "\n".join(["", *lines, "", ""])
