"""The ranks of a benchmark: processes with the same command, which find each other on this host."""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.parallel.process.process_group import RankGroup


def rank_parser(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Make a parser with the options for ranks, threads and rounds."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def run_on_ranks(measure: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Measure as one of the ranks; or start them, as the process that a person has started."""
    if "RANK" in os.environ:
        measure(options)
    else:
        sys.exit(launch(options.ranks, options.threads))


@contextmanager
def rank_group(threads: int) -> "Iterator[RankGroup]":
    """The group of all ranks, on motet's backend, with the settings of training."""
    import torch
    import torch.distributed as dist

    import motet.collectives.shm_backend  # noqa: F401  (registers it)
    from motet.cluster.host_limits import keep_freed_memory
    from motet.parallel.process.process_group import RankGroup

    torch.set_num_threads(threads)
    keep_freed_memory()
    dist.init_process_group("cpu:motet")
    yield RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, threads: int, arguments: Sequence[str] = ()) -> int:
    """Start the ranks, with these arguments added to those of the command, and wait for them; 0 if all ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
        environment = os.environ | {key: str(value) for key, value in (place | meeting).items()}
        started.append(subprocess.Popen([sys.executable, *sys.argv, *arguments], env=environment))
    return max(abs(rank.wait()) for rank in started)
