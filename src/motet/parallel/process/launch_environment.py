"""The rank of a process among all ranks, read from the environment variables of its launcher.

Three launchers are known: motet's own supervisor, torchrun, and Slurm's srun. An incomplete environment is an error,
because a rank that guesses its position waits for ranks that never come.
"""

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from motet.cluster.host_limits import usable_cores
from motet.core.errors import InputError, check_input
from motet.core.token_authentication import RunToken, read_run_token


@dataclass(frozen=True)
class RankEnvironment:
    """One process of a group, and the rendezvous of the group."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # Ranks on this machine
    attempt: int  # Number of earlier starts of the group; every attempt has its keys in the store
    rendezvous: str  # `file://PATH` of a store that every rank can open, or `tcp://HOST:PORT`; empty for one rank
    store_exists: bool = False  # torchrun's agent serves the store at `tcp://`; otherwise rank 0 does
    incarnation: int = 0  # Number of earlier processes of this rank in the same attempt
    cores: int | None = None  # Cores that the launcher reserved for this rank, if it gives them
    token: RunToken | None = None  # Token of the run, if the environment gives one

    @property
    def local_ranks(self) -> range:
        """The ranks on this machine, which launchers number one after another."""
        first = max(0, min(self.rank - self.local_rank, self.world - self.local_world))
        return range(first, first + self.local_world)


SINGLE_RANK = RankEnvironment(rank=0, world=1, local_rank=0, local_world=1, attempt=0, rendezvous="")


def read_rank_environment(environment: Mapping[str, str]) -> RankEnvironment | None:
    """The rank of this process and the run token, or None when no launcher of ranks started it."""
    rank_env = None
    if "MOTET_RANK" in environment:
        rank_env = _from_supervisor(_LauncherVariables(environment, "motet"))
    elif any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        rank_env = _from_torchrun(_LauncherVariables(environment, "torchrun"))
    # A batch script and an interactive shell have SLURM_PROCID too; only a step of srun consists of ranks.
    elif "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        rank_env = _from_slurm(_LauncherVariables(environment, "Slurm"))
    return replace(rank_env, token=read_run_token(environment)) if rank_env else None


def coordinator_address_file(rank_env: RankEnvironment) -> Path:
    """The file next to the store with the address of a parameter server's coordinator."""
    return Path(f"{rank_env.rendezvous.removeprefix('file://')}.coordinator-{rank_env.attempt}")


def cpu_backend_name(setting: str) -> str:
    """The backend of CPU ranks that a setting means on this machine."""
    if setting != "auto":
        return setting
    return "motet" if sys.platform == "linux" and platform.machine() == "x86_64" else "gloo"


def threads_for(rank_env: RankEnvironment, setting: int | None) -> int:
    """Threads of one rank: the setting, or an even fraction of the machine's cores."""
    return setting or rank_env.cores or max(1, usable_cores() // rank_env.local_world)


def environment_variables_for(rank_env: RankEnvironment) -> dict[str, str]:
    """The variables that the supervisor sets for a rank, and `read_rank_environment` reads."""
    return {
        "MOTET_RANK": str(rank_env.rank),
        "MOTET_WORLD": str(rank_env.world),
        "MOTET_ATTEMPT": str(rank_env.attempt),
        "MOTET_RENDEZVOUS": rank_env.rendezvous,
        "MOTET_LIFE": str(rank_env.incarnation),
    }


@dataclass(frozen=True)
class _LauncherVariables:
    environment: Mapping[str, str]
    launcher: str

    def first_set(self, *names: str) -> str:
        """The first of these names that is set, or else the last."""
        return next((name for name in names if name in self.environment), names[-1])

    def text(self, name: str) -> str:
        value = self.environment.get(name, "")
        check_input(
            value,
            f"{name} is not set, though other variables of {self.launcher} are; start every rank with "
            f"{self.launcher}, or unset them and use `motet train --ranks N`",
        )
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        if default is not None and not self.environment.get(name):
            return default
        text = self.text(name)
        if not re.fullmatch(r"[0-9]+", text):
            raise InputError(f"{name} = {text!r} is not a whole number; it should come from {self.launcher}")
        return int(text)

    def port(self, default: int | None = None) -> int:
        port = self.integer("MASTER_PORT", default)
        check_input(1 <= port <= 65535, f"MASTER_PORT = {port} is not a port; give a free one from 1 to 65535")
        return port

    def check(self, rank_env: RankEnvironment) -> RankEnvironment:
        check_input(
            rank_env.rank < rank_env.world and rank_env.local_rank < rank_env.local_world <= rank_env.world,
            f"{self.launcher} gave rank {rank_env.rank} of {rank_env.world} and local rank {rank_env.local_rank} of "
            f"{rank_env.local_world}; give ranks below their counts, and at most as many local ranks as ranks",
        )
        return rank_env


def _from_supervisor(env: _LauncherVariables) -> RankEnvironment:
    rank, world, attempt = (env.integer(f"MOTET_{name}") for name in ("RANK", "WORLD", "ATTEMPT"))
    rendezvous, incarnation = env.text("MOTET_RENDEZVOUS"), env.integer("MOTET_LIFE", default=0)
    return env.check(RankEnvironment(rank, world, rank, world, attempt, rendezvous, incarnation=incarnation))


def _from_torchrun(env: _LauncherVariables) -> RankEnvironment:
    rank, world, local_rank, local_world = map(env.integer, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    port, attempt = env.port(), env.integer("TORCHELASTIC_RESTART_COUNT", default=0)
    rendezvous = _tcp_url(env.text("MASTER_ADDR"), port)
    store_exists = env.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return env.check(RankEnvironment(rank, world, local_rank, local_world, attempt, rendezvous, store_exists))


def _from_slurm(env: _LauncherVariables) -> RankEnvironment | None:
    tasks = env.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, world, local_rank = (env.integer(name) for name in ("SLURM_PROCID", tasks, "SLURM_LOCALID"))
    if world == 1:  # a single task such as `srun --pty bash`
        return None
    job, step = (env.integer(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = env.first_set("SLURM_STEP_NODELIST", "SLURM_NODELIST")
    host = env.environment.get("MASTER_ADDR") or first_host(env.text(hosts))
    # A port below the ephemeral range, which differs for each step of a job.
    port = env.port(default=15000 + (job * 31 + step) % 15000)
    local_world, attempt = _tasks_on_this_node(env, world), env.integer("SLURM_RESTART_COUNT", default=0)
    cores = env.integer("SLURM_CPUS_PER_TASK", default=0) or None
    return env.check(RankEnvironment(rank, world, local_rank, local_world, attempt, _tcp_url(host, port), cores=cores))


def first_host(nodelist: str) -> str:
    """`node[01-03,7],other` -> `node01`: the first host of a Slurm node list."""
    first = re.fullmatch(r"((?:[^,\[\]\s]|\[\d[^\[\]\s]*\])+)(?:,.*)?", nodelist)
    if not first:
        raise InputError(f"SLURM_NODELIST = {nodelist!r} is not a list of nodes; set MASTER_ADDR to the first host")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[1])


def _tasks_on_this_node(env: _LauncherVariables, world: int) -> int:
    """The tasks of this step on this node: `2(x3),1` with SLURM_NODEID = 3 -> 1."""
    text = env.text(env.first_set("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = env.integer("SLURM_NODEID")
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise InputError(f"SLURM_TASKS_PER_NODE = {text!r} is not of the form 4(x2),1; start the ranks with srun")
        tasks += [int(match[1])] * min(int(match[2] or 1), world)
    check_input(node < len(tasks), f"SLURM_NODEID = {node}, but SLURM_TASKS_PER_NODE = {text!r} has {len(tasks)} nodes")
    return tasks[node]


def _tcp_url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
