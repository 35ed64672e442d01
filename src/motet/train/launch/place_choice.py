"""The places that `memory.tiers = "auto"` chooses before ranks start: the first in which a step is predicted to fit.

The device updates states faster than the host, and the host faster from its memory than from files.
"""

from collections.abc import Callable
from typing import Any, get_args

from motet.core.errors import InputError, check_input
from motet.memory.policy_choice import Place
from motet.parallel.model_sharding import TENSOR_DIMENSION
from motet.plan.planned_cluster import load_planned_cluster
from motet.plan.search.ranking import LayoutRanking
from motet.train.forecast.planned_job import planned_step, step_of_run
from motet.train.job import Job
from motet.train.job_step_plan import predicted_stages
from motet.train.launch.preflight import check_job, check_memory, knows_memory


def choose_places(job: Job, log: Callable[[str], None]) -> Job:
    """The job with the chosen place of masters and moments, for local ranks; `log` gets the choice and its reason."""
    if job.memory.tiers != "auto":
        return job
    ranks, problems = job.run.ranks, list[str]()
    places: tuple[Place, ...] = get_args(Place)
    if job.memory.update == "delayed":
        problems.append("with device, memory.update = 'delayed' has no effect")
        places = places[1:]
    check_job(_with_place(job, places[0]), ranks)  # Other mistakes of the job are no reasons for another place
    for place in places:
        candidate = _with_place(job, place)
        problem = _problem(candidate, ranks, cluster=job.communication.cluster)
        if problem is None:
            reason = "; ".join(problems) or "a step fits on the devices"
            log(f"memory.tiers = 'auto' chooses memory.optimizer={place}: {reason}")
            return candidate
        problems.append(f"with {place}, {problem.partition(';')[0]}")
    raise InputError(
        f"memory.tiers = 'auto' finds no place for masters and moments: {'; '.join(problems)}; use more ranks, "
        "shard the states (layout.zero), or take a smaller model"
    )


def _with_place(job: Job, place: Place) -> Job:
    """The job with a place. On devices alone, a cluster that no algorithm reads has served the choice."""
    update: dict[str, Any] = {"memory": job.memory.with_optimizer(place)}
    is_read = job.communication.has_algorithms or job.layout.dims.size(TENSOR_DIMENSION) > 1
    if place == "device" and not is_read:
        update["communication"] = job.communication.model_copy(update={"cluster": None})
    return job.model_copy(update=update)


def _problem(job: Job, ranks: int, *, cluster: str | None) -> str | None:
    """Why a step does not fit, or None. The cluster has the memory of GPUs."""
    if job.memory.optimizer == "disk" and job.memory.folder is None:
        return "memory.folder is not set"
    is_known = knows_memory(job)
    check_input(
        is_known or cluster is not None,
        "memory.tiers = 'auto' does not know the memory of this device or the sizes of this model; set "
        "memory.device_limit for a model of motet, communication.cluster for GPUs, or memory.optimizer",
    )
    try:
        layout = check_job(job, ranks)
        check_memory(job, range(ranks), ranks)
        if is_known:
            return None
        assert cluster is not None
        step = planned_step(job, layout)
        step = step_of_run(job, step, layout, stages=predicted_stages(job, layout).stages)
        return LayoutRanking(step, load_planned_cluster(cluster, ranks)).predict(step)[1]
    except InputError as error:
        return str(error)
