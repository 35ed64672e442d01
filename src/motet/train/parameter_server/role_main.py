"""Entry points of the ranks of a run with a parameter server."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from motet.monitor.callback import Callback
from motet.parallel.parameter_server.protocol.messages import COORDINATOR
from motet.parallel.parameter_server.server_settings import extra_process_count
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.train.build import precision_context
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import RunProgress
from motet.train.parameter_server.coordinator import run_coordinator
from motet.train.parameter_server.process_roles import ParameterServerRoleContext
from motet.train.parameter_server.server import run_server
from motet.train.parameter_server.worker import run_worker


def run_parameter_server_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    names = [COORDINATOR, *(f"s{index}" for index in range(extra_process_count(job.layout.server) - 1))]
    name = names[rank_env.rank] if rank_env.rank < len(names) else f"w{rank_env.rank - len(names)}"
    return run_role(ParameterServerRoleContext(job, rank_env, name), folder, stop, callbacks)


def run_late_worker(job: Job, rank_env: RankEnvironment, host: str, stop: StopFlag) -> None:
    """Join a run as another worker. The host makes its name unique."""
    run_role(ParameterServerRoleContext(job, rank_env, f"{host}/w{rank_env.rank}"), Path(), stop)


def run_role(
    role: ParameterServerRoleContext, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    torch.set_num_threads(threads_for(role.rank_env_among_workers, role.job.run.threads))
    with precision_context(role.job):
        if role.role_name == COORDINATOR:
            return run_coordinator(role, folder, stop, callbacks)
        if not role.is_worker:
            run_server(role, folder)
        elif role.colocated_server is None:
            run_worker(role, stop)
        else:
            _run_worker_with_server(role, role.colocated_server, folder, stop)
    return RunProgress(0, 0)


def _run_worker_with_server(
    role: ParameterServerRoleContext, server: ParameterServerRoleContext, folder: Path, stop: StopFlag
) -> None:
    """Run a worker, and a server as a thread. An error of the server is raised first, as the cause of the other."""

    def run_server_thread() -> None:
        try:
            with precision_context(server.job):
                run_server(server, folder)
        except BaseException as error:  # noqa: BLE001  # raised by the other thread
            role.sibling_errors.append(error)

    thread = threading.Thread(target=run_server_thread, daemon=True)
    thread.start()
    try:
        run_worker(role, stop)
        thread.join()
    finally:
        if role.sibling_errors:
            raise role.sibling_errors[0]
