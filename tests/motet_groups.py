"""A group on the backend `motet`, for tests that start it themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from motet.collectives.shm_backend.transport import rendezvous
from motet.core.token_authentication import TOKEN_VARIABLE
from motet.parallel.process.launch_environment import RankEnvironment


@contextmanager
def motet_group(place: RankEnvironment, timeout_s: float = 20.0) -> Iterator[dist.ProcessGroup]:
    """Every `place.local_world` ranks claim a host of their own."""
    identity = f"host {place.rank // place.local_world}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_identity", lambda: identity)
        if place.local_world < place.world:
            patch.setenv(TOKEN_VARIABLE, "of the tests of the backend")
        with _group(place, timeout_s) as group:
            yield group


@contextmanager
def _group(place: RankEnvironment, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(place.rendezvous.removeprefix("file://"), place.world)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("cpu:motet", store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
        dist.barrier()
    finally:
        dist.destroy_process_group()
