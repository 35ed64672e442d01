"""Where a process stands among all ranks, read from what its launcher put into the environment.

Three launchers are known: motet's own supervisor, torchrun, and Slurm's srun. Half of an environment is refused with a
sentence, because a rank that guesses its place waits for others that never come.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.cluster.cpu_count import usable_cores
from motet.core.errors import InputError


@dataclass(frozen=True)
class RankEnvironment:
    """One process of a group, and where the group meets."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # Ranks on this machine
    attempt: int  # How often the group was started before; every attempt meets on fresh keys
    rendezvous: str  # `file://PATH` of a store that every rank can open, or `tcp://HOST:PORT`; empty for a world of one
    # The store at `tcp://` is there already (torchrun's agent serves it); otherwise rank 0 serves it.
    store_exists: bool = False
    incarnation: int = 0  # How many processes had this place before, while the others went on
    cores: int | None = None  # Cores that the launcher gave to this rank alone, when it says so


_LARGEST_PORT = 65535

SINGLE_RANK = RankEnvironment(rank=0, world=1, local_rank=0, local_world=1, attempt=0, rendezvous="")


def read_rank_environment(environment: Mapping[str, str]) -> RankEnvironment | None:
    """The place of this process, or None when no launcher of ranks started it."""
    if "MOTET_RANK" in environment:
        return _from_supervisor(environment)
    if any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _from_torchrun(environment)
    # A batch script and an interactive shell have SLURM_PROCID too; only a step of srun consists of ranks.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from_slurm(environment)
    return None


def coordinator_address_file(rank_env: RankEnvironment) -> Path:
    """The file next to the store with the address of a parameter server's coordinator."""
    return Path(f"{rank_env.rendezvous.removeprefix('file://')}.coordinator-{rank_env.attempt}")


def threads_for(rank_env: RankEnvironment, setting: int | None) -> int:
    """Threads of one rank, so that ranks do not fight for cores: as set, or an even share of this machine's."""
    return setting or rank_env.cores or max(1, usable_cores() // rank_env.local_world)


def environment_variables_for(rank_env: RankEnvironment) -> dict[str, str]:
    """What the supervisor sets for a rank; `place_from` reads it."""
    return {
        "MOTET_RANK": str(rank_env.rank),
        "MOTET_WORLD": str(rank_env.world),
        "MOTET_ATTEMPT": str(rank_env.attempt),
        "MOTET_RENDEZVOUS": rank_env.rendezvous,
        "MOTET_LIFE": str(rank_env.incarnation),
    }


def _from_supervisor(environment: Mapping[str, str]) -> RankEnvironment:
    rank, world, attempt = (_read_int(environment, f"MOTET_{name}", "motet") for name in ("RANK", "WORLD", "ATTEMPT"))
    rendezvous = _read_text(environment, "MOTET_RENDEZVOUS", "motet")
    incarnation = _read_int(environment, "MOTET_LIFE", "motet", default=0)
    return _validate(RankEnvironment(rank, world, rank, world, attempt, rendezvous, incarnation=incarnation), "motet")


def _from_torchrun(environment: Mapping[str, str]) -> RankEnvironment:
    rank, world, local_rank, local_world = (
        _read_int(environment, name, "torchrun") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    port = _read_port(environment, "torchrun")
    attempt = _read_int(environment, "TORCHELASTIC_RESTART_COUNT", "torchrun", default=0)
    rendezvous = _tcp_url(_read_text(environment, "MASTER_ADDR", "torchrun"), port)
    store_exists = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _validate(
        RankEnvironment(rank, world, local_rank, local_world, attempt, rendezvous, store_exists), "torchrun"
    )


def _from_slurm(environment: Mapping[str, str]) -> RankEnvironment | None:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, world, local_rank = (
        _read_int(environment, name, "Slurm") for name in ("SLURM_PROCID", tasks, "SLURM_LOCALID")
    )
    if world == 1:  # one task alone, e.g. `srun --pty bash`: nothing to meet
        return None
    job, step = (_read_int(environment, name, "Slurm") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environment else "SLURM_NODELIST"
    host = environment.get("MASTER_ADDR") or first_host(_read_text(environment, hosts, "Slurm"))
    # Below the range of ephemeral ports, and another one for each step of a job.
    port = _read_port(environment, "Slurm", default=15000 + (job * 31 + step) % 15000)
    rank_env = RankEnvironment(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=_tasks_on_this_node(environment, world),
        attempt=_read_int(environment, "SLURM_RESTART_COUNT", "Slurm", default=0),
        rendezvous=_tcp_url(host, port),
        cores=_read_int(environment, "SLURM_CPUS_PER_TASK", "Slurm", default=0) or None,
    )
    return _validate(rank_env, "Slurm")


def first_host(nodelist: str) -> str:
    """`node[01-03,7],other` -> `node01`: the first machine of a Slurm list of nodes."""
    first = re.fullmatch(r"((?:[^,\[\]\s]|\[\d[^\[\]\s]*\])+)(?:,.*)?", nodelist)
    if not first:
        raise InputError(f"SLURM_NODELIST = {nodelist!r} is no list of nodes; set MASTER_ADDR to the first host")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def _tasks_on_this_node(environment: Mapping[str, str], world: int) -> int:
    """`2(x3),1` with SLURM_NODEID = 3 -> 1: the tasks of this step on this node."""
    steps = "SLURM_STEP_TASKS_PER_NODE"
    text = _read_text(environment, steps if steps in environment else "SLURM_TASKS_PER_NODE", "Slurm")
    node = _read_int(environment, "SLURM_NODEID", "Slurm")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise InputError(f"SLURM_TASKS_PER_NODE = {text!r} is not of the form 4(x2),1; start the ranks with srun")
        counts += [int(match[1])] * min(int(match[2] or 1), world)
    if node >= len(counts):
        raise InputError(f"SLURM_NODEID = {node}, but SLURM_TASKS_PER_NODE = {text!r} has {len(counts)} nodes")
    return counts[node]


def _tcp_url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _read_text(environment: Mapping[str, str], name: str, launcher: str) -> str:
    value = environment.get(name)
    if not value:
        raise InputError(
            f"{name} is not set, though other variables of {launcher} are; start every rank with {launcher}, "
            f"or unset them and use `motet train --ranks N`"
        )
    return value


def _read_int(environment: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _read_text(environment, name, launcher)
    if not re.fullmatch(r"[0-9]+", text):
        raise InputError(f"{name} = {text!r} is not a whole number; it should come from {launcher}")
    return int(text)


def _read_port(environment: Mapping[str, str], launcher: str, default: int | None = None) -> int:
    port = _read_int(environment, "MASTER_PORT", launcher, default)
    if not 1 <= port <= _LARGEST_PORT:
        raise InputError(f"MASTER_PORT = {port} is no port; give a free one from 1 to {_LARGEST_PORT}")
    return port


def _validate(rank_env: RankEnvironment, launcher: str) -> RankEnvironment:
    if not (rank_env.rank < rank_env.world and rank_env.local_rank < rank_env.local_world <= rank_env.world):
        raise InputError(
            f"{launcher} gave rank {rank_env.rank} of {rank_env.world} and local rank {rank_env.local_rank} of "
            f"{rank_env.local_world}; a rank must be below its count, and no more ranks can be local than there are"
        )
    return rank_env
