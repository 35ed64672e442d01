"""The output of `motet plan JOB`: the best layouts on a cluster, and why the others do not fit."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.cli.job_arguments import load_job_or_config, trace_job
from motet.cli.output import OutputLine, log, print_lines, table_lines
from motet.core.errors import InputError, check_input
from motet.core.trace import progress_if_slow
from motet.core.units import format_bytes, format_duration
from motet.models.hf.hf_config import known_model_types, read_config, settings_from_config
from motet.models.settings import UserModuleSettings
from motet.models.spec.spec_file import read_spec_file
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import layout_of_sizes, parse_layout
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster, product_peak
from motet.plan.planned_step import POLICY_OF_BLOCKS, PlannedModel, PlannedStep
from motet.plan.search.layout_space import with_layout
from motet.plan.search.ranking import LayoutRanking, RankedPlan, Ranking, RejectedPlan
from motet.plan.validation.expected_errors import errors_on_device
from motet.train.forecast.planned_job import planned_step
from motet.train.job import Job
from motet.train.launch.preflight import check_job

_TOKENS = re.compile(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_LONG_DAYS = 2  # Longer durations are given in days
_EXAMPLES = 3  # Rejected layouts that are shown by default


@dataclass(frozen=True)
class PlanRequest:
    """The options of the command."""

    source: str
    overrides: tuple[str, ...]
    cluster: str
    gpus: int
    layout: str | None
    top: int
    tokens: str | None
    stack: str
    matmul: str | None
    model: Path | None
    shows_rejected: bool
    json: bool


def plan_layouts(request: PlanRequest) -> None:
    """Print the ranking, or the prediction of one layout."""
    tokens = parse_tokens(request.tokens) if request.tokens is not None else None
    check_input(request.stack in STACKS, f"--stack {request.stack!r}: use one of {', '.join(STACKS)}")
    check_input(request.top >= 1, f"--top {request.top}: give 1 or more")
    job = load_job_or_config(request.source, [*request.overrides])
    cluster = load_planned_cluster(request.cluster, request.gpus)
    model, stack = planned_model(job, request.model), stack_on(cluster, request.stack)
    step = planned_step(job, layout_of_sizes(), model=model, stack=stack, matmul=request.matmul)
    ranking = LayoutRanking(step, cluster)
    if request.layout is not None:
        plan, reason = ranking.predict(with_layout(step, request.layout, request.gpus))
        outcome = Ranking((plan,), (), int(reason is None))
    else:
        outcome, reason = ranking.rank(request.top, progress_if_slow(log)), None
    report = _report(request, job, (cluster, outcome), reason=reason)
    if tokens is not None:
        _add_cost(report, cluster, tokens / step.tokens)
    if not outcome.plans:
        raise InputError(_fits_nowhere(request, outcome))
    if request.json:
        rejected = [{"layout": str(each.layout), "reason": each.reason} for each in outcome.rejected]
        print_json(report | ({"rejected": rejected} if request.shows_rejected else {}))
        return
    costs = () if tokens is None else (_cost_line(report["plans"][0], request.tokens, cluster),)
    print_lines(*_lines(report, request, outcome), *costs, _assumptions(step, cluster))


def parse_tokens(text: str) -> float:
    """A number of tokens: 15.6T, 300B or 1e12."""
    match = _TOKENS.fullmatch(text.strip())
    count = float(match[1]) * _SCALE[match[2].lower()] if match else 0.0
    check_input(0 < count < 1e18, f"--tokens {text!r} is no number of tokens; write it as 15.6T, 300B or 1e12")
    return count


def stack_on(cluster: PlannedCluster, name: str) -> str:
    """The framework of this name for the devices of a cluster."""
    return "motet-cpu" if cluster.is_processor and name == "motet" else name


def planned_model(job: Job, file: Path | None) -> PlannedModel:
    """The settings of a known model, the spec of a file, or the trace of a model of which neither is there."""
    if file is not None:
        return read_spec_file(file).spec
    if not isinstance(job.model, UserModuleSettings):
        return job.model
    path = job.model.hf_path
    try:
        config = {} if path is None else {**read_config(path), **job.model.arguments}
        return settings_from_config(config)
    except InputError:
        if config.get("model_type") in known_model_types():
            raise
    return trace_job(job)


def _runs_today(step: PlannedStep, job: Job) -> bool:
    """Whether motet can train the job with this layout, by the checks that refuse jobs."""
    if step.recompute not in POLICY_OF_BLOCKS:
        return False
    memory = job.memory.model_copy(update={"recompute": step.recompute})
    try:
        layout = parse_layout(str(step.layout))
        check_job(job.model_copy(update={"layout": layout, "memory": memory}), step.layout.ranks)
    except (InputError, ValueError):
        return False
    return True


def _report(
    request: PlanRequest, job: Job, ranked: tuple[PlannedCluster, Ranking], *, reason: str | None
) -> dict[str, Any]:
    cluster, outcome = ranked
    plans = [
        _plan_report(plan, cluster, reason) | {"runs_today": _runs_today(plan.step, job)} for plan in outcome.plans
    ]
    return {"cluster": cluster.name, "model": request.source, "gpus": request.gpus, "plans": plans}


def _plan_report(plan: RankedPlan, cluster: PlannedCluster, reason: str | None) -> dict[str, Any]:
    step, seconds = plan.step, plan.time.seconds
    time_error, memory_error = errors_on_device(cluster.device.name, cluster.devices, has_experts=step.has_experts)
    worst = plan.memory.worst
    peak = product_peak(cluster.device, step.matmul)
    mfu = step.model_flops() / seconds / cluster.devices / peak if peak else None
    overhead = {"allocator": worst.reserved - worst.allocated, "context": worst.outside - worst.reserved}
    return {
        "layout": step.layout_text,
        "runs_today": False,
        "fits": reason is None,
        "reason": reason,
        "step_time_s": seconds,
        "step_time_error": time_error,
        "tokens_per_s_per_gpu": step.tokens / seconds / cluster.devices,
        "mfu": mfu,
        "memory_bytes": dict(worst.bytes) | overhead | {"total": worst.outside},
        "memory_error": memory_error,
        "time_s": {name: value for name, value in plan.time.parts.items() if value},
    }


def _add_cost(report: dict[str, Any], cluster: PlannedCluster, steps: float) -> None:
    for plan in report["plans"]:
        seconds = steps * plan["step_time_s"]
        hours = seconds / 3600 * cluster.devices
        price, power = cluster.device.price_per_hour, cluster.device.power_W
        plan |= {"days": seconds / 86400, "gpu_hours": hours, "usd": price and hours * price.value}
        plan |= {"energy_kWh": power and hours * power.value / 1000}


def _fits_nowhere(request: PlanRequest, outcome: Ranking) -> str:
    known = [each for each in outcome.rejected if each.missing_bytes < float("inf")]
    if not known:
        return (
            f"no layout of {request.source} is possible on --gpus {request.gpus}: no sizes divide its heads, layers "
            "and global batch; give another number of GPUs, or another data.batch_sequences"
        )
    nearest = min(known, key=lambda each: each.missing_bytes)
    return (
        f"{request.source} fits nowhere on --gpus {request.gpus} of cluster {request.cluster}; the nearest layout is "
        f'"{nearest.layout}", where {format_bytes(nearest.missing_bytes)} are missing ({nearest.reason}); give more '
        "GPUs, a device with more memory, or a smaller model"
    )


def _lines(report: dict[str, Any], request: PlanRequest, outcome: Ranking) -> Iterator[OutputLine]:
    rows = []
    for number, plan in enumerate(report["plans"], 1):
        error = plan["step_time_error"]
        rows.append(
            (
                f"{number}",
                f"{plan['step_time_s']:.3g} s" + (f" ±{error:.0%}" if error is not None else ""),
                f"{plan['tokens_per_s_per_gpu']:.0f}",
                f"{plan['mfu']:.1%}" if plan["mfu"] is not None else "-",
                format_bytes(plan["memory_bytes"]["total"]),
                "yes" if plan["runs_today"] else "no",
                plan["layout"],
            )
        )
    header = ("", "step", "tokens/s/GPU", "MFU", "memory", "today", "layout")
    yield from table_lines(rows, header=header, right=range(6))
    for plan in report["plans"][:1]:
        parts = sorted(plan["time_s"].items(), key=lambda item: -item[1])
        yield "time of the first: " + ", ".join(f"{name} {value:.3g} s" for name, value in parts if value >= 1e-6)
        memory = (item for item in plan["memory_bytes"].items() if item[0] != "total" and item[1])
        yield "memory of the first: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in memory)
        if plan["reason"]:
            yield f"it does not fit: {plan['reason']}"
    if request.layout is None:
        yield from _rejected_lines(outcome, shows_all=request.shows_rejected)


def _cost_line(plan: dict[str, Any], tokens: str | None, cluster: PlannedCluster) -> str:
    costs = [f"{plan['gpu_hours']:,.0f} GPU-hours"]
    price, power = cluster.device.price_per_hour, cluster.device.power_W
    if power is not None:
        costs.append(f"{plan['energy_kWh'] / 1000:,.3g} MWh at {power.value:g} W for each device ({power.origin})")
    if price is not None:
        costs.append(f"{plan['usd']:,.0f} USD at {price.value:g} for each GPU-hour ({price.origin})")
    duration = f"{plan['days']:,.1f} days" if plan["days"] >= _LONG_DAYS else format_duration(plan["days"] * 86400)
    return f"{tokens} tokens take {duration} with the first: {', '.join(costs)}"


def _assumptions(step: PlannedStep, cluster: PlannedCluster) -> str:
    experts = ", experts that all get equally many tokens" if step.spec.expert_count else ""
    return (
        f"Predicted, not measured, for {cluster.device.name} with {format_bytes(cluster.device.usable_bytes)} that a "
        f"process can use, {cluster.devices_per_host} on a host, the framework {step.stack.name!r}, products in "
        f"{step.matmul}{experts}, and no slow or failed device. Model FLOPs count causal attention half and leave "
        "recomputation out; `±` is the 90th percentile of the errors of published steps on such devices. "
        "`motet plan validate` predicts published steps."
    )


def _rejected_lines(outcome: Ranking, *, shows_all: bool) -> Iterator[str]:
    rejected = outcome.rejected
    yield f"{outcome.considered:,} layouts fit, {len(rejected):,} do not"
    if shows_all:
        yield from (f"  {each.layout}: {each.reason}" for each in rejected)
        return
    kinds = Counter(_kind(each) for each in rejected)
    for kind, count in kinds.most_common():
        examples = [each for each in rejected if _kind(each) == kind][:_EXAMPLES]
        yield f"  {count:,} {kind}, such as"
        yield from (f"    {each.layout}: {each.reason}" for each in examples)


def _kind(rejected: RejectedPlan) -> str:
    if rejected.missing_bytes == float("inf"):
        return "are impossible"
    return "need more memory for states alone" if rejected.reason.startswith("states") else "need more memory"
