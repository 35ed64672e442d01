"""The planner's prediction of a step of a run: memory from the job, time also from rates that are measured here.

On processors rates of kernels are measured in a fraction of a second, unless `communication.cluster` names a file with
a section [rates]. A run leaves out a number that cannot be predicted, and never fails because of it.
"""

from pathlib import Path

import torch

from motet.cluster.cluster_settings import ClusterSettings
from motet.cluster.device_specs import find_device
from motet.cluster.local_device import device_name, measure_host, measure_rates
from motet.core.config_loading import settings_from_dict
from motet.core.errors import InputError
from motet.monitor.events import StepPredicted
from motet.parallel.layout import Layout
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.planned_cluster import PlannedCluster, describe_hardware, load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.train.forecast.planned_job import own_stack, planned_step, step_of_run
from motet.train.job import Job

_REPEATS = 3
_ALPHA_S = 30e-6  # Latency of a message between processes of one host; assumed
_BUS_SHARE = 0.5  # Share of the memory's bandwidth: a message is written and read; assumed


def predict_step(job: Job, layout: Layout, stages: tuple[range, ...], *, device: torch.device) -> StepPredicted | None:
    """The prediction; None where the planner knows no model, layout or part of the step like this one."""
    if job.layout.data != "all_reduce" or job.outer.every is not None:
        return None
    try:
        stack = own_stack(job) if device.type == "cuda" else "motet-cpu"
        step = planned_step(job, layout, stack=stack, packed=job.data.restart_documents)
        step = step_of_run(job, step, layout, stages=stages)
        live_bytes = round(estimate_memory(step).worst.allocated)
    except InputError:
        return None
    return StepPredicted(step_time_s=_seconds(job, step, device), live_bytes=live_bytes)


def _seconds(job: Job, step: PlannedStep, device: torch.device) -> float | None:
    try:
        cluster = _cluster(job, step.layout.ranks, device)
        return None if cluster is None else cluster.step_times.predict(step).seconds
    except InputError:
        return None


def _cluster(job: Job, ranks: int, device: torch.device) -> PlannedCluster | None:
    """The hardware of a run; None if the links between its ranks are not known."""
    source = job.communication.cluster
    if source is not None:
        return load_planned_cluster(source, ranks)
    if device.type != "cpu":
        name = device_name(device)
        if ranks > 1 or not find_device(name):
            return None
        port = {"kind": "switch", "alpha_s": 0, "bandwidth_Bps": 1}  # One device sends nothing
        host = {} if job.memory.optimizer == "device" else {"host": measure_host(1, device=device)}
        return _planned({"device": name, "devices_per_host": 1, "inside": port, **host}, 1)
    rates = measure_rates(job.precision.resolved.compute, _REPEATS)
    bus_Bps = rates["memory_Bps"]["value"] * _BUS_SHARE  # noqa: N806 - a unit
    port = {"kind": "bus", "alpha_s": _ALPHA_S, "bandwidth_Bps": bus_Bps, "bus_Bps": bus_Bps}
    values = {"device": "CPU", "devices_per_host": ranks, "gamma_s_per_byte": 1 / bus_Bps, "inside": port}
    if job.memory.optimizer != "device":
        values["host"] = measure_host(ranks)
    return _planned(values | {"rates": rates}, ranks)


def _planned(values: dict[str, object], ranks: int) -> PlannedCluster:
    settings = settings_from_dict(ClusterSettings, values, "this machine")
    return describe_hardware(settings, Path("this machine"), ranks)
