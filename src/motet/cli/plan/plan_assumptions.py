"""The assumptions of a plan about devices, frameworks and hosts, and the sentences that state them."""

from collections import defaultdict
from collections.abc import Sequence

from motet.core.errors import check_input
from motet.core.units import format_bytes
from motet.plan.planned_cluster import PlannedCluster
from motet.plan.planned_step import PlannedStep
from motet.train.forecast.planned_job import reason_against_compiled_plan
from motet.train.job import Job


def stack_on(cluster: PlannedCluster, name: str | None, job: Job) -> str:
    """The framework of this name for the devices of a cluster; without a name it is motet, which compiles the blocks of
    a job on GPUs, or does not."""
    if cluster.is_processor:
        check_input(
            name != "motet-compiled", f"--stack {name!r} is motet on GPUs, not on {cluster.device.name}; leave it out"
        )
        return "motet-cpu" if name in (None, "motet") else name
    check_input(
        name != "motet-cpu", f"--stack {name!r} is motet on processors, not on {cluster.device.name}; leave it out"
    )
    reason = reason_against_compiled_plan(job)
    check_input(name != "motet-compiled" or reason is None, f"--stack {name!r} does not go with {reason}; leave it out")
    return name or ("motet-compiled" if reason is None else "motet")


def rates_note(step: PlannedStep, cluster: PlannedCluster) -> str:
    """A sentence on the rates of motet's kernels that nobody has measured on the devices of a cluster, or nothing."""
    if cluster.measured is None or step.matmul in cluster.measured.products:
        return step.block_stack.assumption(cluster.measured is not None)
    note = step.block_stack.assumption(has_measured_rates=False)
    return f"{note} It has none for products in {step.matmul}." if note else ""


def assumptions(steps: Sequence[PlannedStep], cluster: PlannedCluster, headroom: str) -> str:
    """The assumptions behind predictions of steps of one model, in sentences."""
    step, rows = steps[0], defaultdict[str, list[str]](list)
    for number, each in enumerate(steps, 1):
        rows[each.block_stack.name].append(str(number))
    names = [f"{name!r} (layouts {', '.join(places)})" for name, places in rows.items()]
    names = names if len(rows) > 1 else [repr(name) for name in rows]
    experts = ", experts that all get equally many tokens" if step.spec.expert_count else ""
    notes = filter(None, (rates_note(each, cluster) for each in steps))
    return (
        f"Predicted, not measured, for {cluster.device.name} with {format_bytes(cluster.device.usable_bytes)} that a "
        f"process can use ({headroom} of it stay free), {cluster.devices_per_host} on a host, the framework "
        f"{' or '.join(names)}, products in "
        f"{step.matmul}{experts}, and no slow or failed device. Model FLOPs count causal attention half and leave "
        "recomputation out; `±` is the 90th percentile of the errors of published steps on such devices to which the "
        "planner was not fitted. `motet plan validate` predicts published steps."
        + (f" {note}" if (note := next(notes, "")) else "")
    )


def host_assumptions(cluster: PlannedCluster) -> str:
    """The figures of a host, with their origin."""
    host = cluster.host
    assert host is not None
    figures = [
        f"{format_bytes(host.memory_bytes.value)} of memory ({host.memory_bytes.origin})",
        f"a link of {host.link_Bps.value / 1e9:g} GB/s to each device ({host.link_Bps.origin})",
        f"{host.cores} cores that update {host.update_Bps.value / 1e9:g} GB/s of states ({host.update_Bps.origin})",
    ]
    if (disk := host.scratch_Bps) is not None:
        figures.append(f"a disk of {disk.value / 1e9:g} GB/s ({disk.origin})")
    return f"A host has {', '.join(figures)}; no published step has checked these times."
