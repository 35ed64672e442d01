"""The ranks of a benchmark: the same command again, in processes that find each other on this host."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def launch(ranks: int, threads: int, arguments: Sequence[str] = ()) -> int:
    """Start the ranks, with these arguments beside those of the command, and wait for them; 0 if all ended well."""
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
