"""Torch's own tests of a distributed backend, run on ranks of ours with every group made by `motet`.

Torch picks tests by the name of the backend, and does not know ours. So `motet` stands in for gloo: torch's function
through which every group is made gives one of `motet` under that name. What torch keeps for MPI is run too: it is the
all-to-all of CPU tensors, which gloo had not.
"""

import importlib
import os
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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

WORLD = 4
"""The smallest at which torch leaves no test out for the number of ranks."""
ALSO = "Only MPI supports"


def names(place: RankEnvironment) -> list[str]:
    return list(unittest.TestLoader().getTestCaseNames(_suite()[1]))


def run(place: RankEnvironment, name: str) -> str:
    """Run one test on this rank, and return why torch leaves it out, or nothing."""
    module, suite = _suite()
    # Torch's runner looks at this before it starts ranks; the function itself does not.
    reason: str = getattr(getattr(suite, name), "__unittest_skip_why__", "")
    if reason and not reason.startswith(ALSO):
        return reason
    folder = Path(place.rendezvous.removeprefix("file://")).parent
    with _surroundings(module, folder, place.world), warnings.catch_warnings(), _standing_in():
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
    """Give each of torch's tests the environment of a separate process."""
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(exist_ok=True)
    environment = {
        "TEMP_DIR": str(folder),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        # Tests of groups that are a part of the ranks are left out below 8 ranks, except for MPI; they need 3.
        "BACKEND": "mpi",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
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
    """The meaning of the exit code with which a test ends its process."""
    for skip in importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS.values():
        if skip.exit_code == leave.code:
            return str(skip.message)
    raise leave


@cache
def _suite() -> tuple[ModuleType, Any]:
    """Torch's module, which reads the environment when it is imported, and its tests as a class."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD), INIT_METHOD="file://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    return module, type("Suite", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
