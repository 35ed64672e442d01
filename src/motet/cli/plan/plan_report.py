"""The output of `motet plan JOB`: the best layouts on a cluster, and why the others do not fit."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet.cli.job_arguments import load_job_or_config, trace_job
from motet.cli.output import OutputLine, check_writable, log, print_lines, table_lines
from motet.cli.plan.plan_assumptions import assumptions, host_assumptions, stack_on
from motet.core.errors import InputError, check_input
from motet.core.text_files import to_toml, write_file_atomically
from motet.core.trace import progress_if_slow
from motet.core.units import format_bytes, format_duration
from motet.models.hf.hf_config import known_model_types, read_config, settings_from_config
from motet.models.settings import UserModuleSettings
from motet.models.spec.spec_file import read_spec_file
from motet.monitor.stdout_stderr import print_json
from motet.parallel.layout import Layout, layout_of_sizes, parse_layout
from motet.plan.frameworks import STACKS
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster, product_peak
from motet.plan.planned_step import POLICY_OF_BLOCKS, PlannedModel, PlannedStep
from motet.plan.search.layout_space import with_layout
from motet.plan.search.ranking import LayoutRanking, RankedKind, RankedPlan, Ranking, Refusal, RejectedPlan
from motet.plan.validation.expected_errors import errors_on_device
from motet.train.forecast.planned_job import planned_step
from motet.train.job import Job
from motet.train.launch.preflight import check_job

_TOKENS = re.compile(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([kmbt]?)", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_LONG_DAYS = 2  # Longer durations are given in days
_MOST_TOLERANCE = 0.1
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
    stack: str | None
    matmul: str | None
    model: Path | None
    headroom: str
    shows_all: bool
    shows_rejected: bool
    json: bool
    compared: tuple[str, ...]
    svg: Path | None
    write: Path | None


def split_layouts(words: tuple[str, ...], compared: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The settings among words, and the layouts to compare: those of --compare and the words after it."""
    layouts = tuple(word for word in words if compared and "." not in word.partition("=")[0])
    return tuple(word for word in words if word not in layouts), compared + layouts


def plan_layouts(request: PlanRequest) -> None:
    """Print the ranking, or the prediction of one layout."""
    tokens = parse_tokens(request.tokens) if request.tokens is not None else None
    is_known = request.stack is None or request.stack in STACKS
    check_input(is_known, f"--stack {request.stack!r}: use one of {', '.join(STACKS)}")
    check_input(request.top >= 1, f"--top {request.top}: give 1 or more")
    job = load_job_or_config(request.source, [*request.overrides])
    cluster = load_planned_cluster(request.cluster, request.gpus)
    model, stack = planned_model(job, request.model), stack_on(cluster, request.stack, job)
    step = planned_step(job, layout_of_sizes(), model=model, stack=stack, matmul=request.matmul)
    tries_tiers = "optimizer" not in job.memory.model_fields_set
    ranking = LayoutRanking(step, cluster, headroom=parse_headroom(request.headroom), tries_tiers=tries_tiers)
    refusal = TrainingRefusals(job)
    if request.compared:
        _compare(request, job, (step, cluster, ranking))
        return
    check_input(request.svg is None, "--svg draws a comparison: name the layouts with --compare")
    if request.layout is not None:
        plan, reason = ranking.predict(with_layout(step, request.layout, request.gpus))
        outcome = Ranking((RankedKind(plan),), (), int(reason is None))
    else:
        tolerance, reason = _equal_within(_time_error(step, cluster)), None
        chosen = None if request.shows_all else refusal
        outcome = ranking.rank(request.top, progress_if_slow(log), tolerance=tolerance, refusal=chosen)
    report = _report(request, refusal, (cluster, outcome), reason=reason)
    if tokens is not None:
        _add_cost(report, cluster, tokens / step.tokens)
    if not outcome.kinds:
        raise InputError(_fits_nowhere(request, outcome) + _missing_host(ranking, cluster))
    if request.write is not None:
        _write_job(request.write, job, outcome.kinds[0].best.step)
    if request.json:
        rejected = [{"layout": str(each.layout), "reason": each.reason} for each in outcome.rejected]
        print_json(report | ({"rejected": rejected} if request.shows_rejected else {}))
        return
    costs = () if tokens is None else (_cost_line(report["plans"][0], request.tokens, cluster),)
    notes = [_tier_note(ranking, cluster, outcome, top=request.top)] if request.layout is None else []
    steps = [kind.best.step for kind in outcome.kinds]
    notes = [*filter(None, notes), *costs, assumptions(steps, cluster, request.headroom)]
    if any(each.states != "device" for each in steps):
        notes.append(host_assumptions(cluster))
    print_lines(*_lines(report, request, outcome), *notes)


def _compare(request: PlanRequest, job: Job, planned: tuple[PlannedStep, PlannedCluster, LayoutRanking]) -> None:
    """Print the predictions of several layouts side by side."""
    from motet.cli.plan.layout_comparison import comparison_lines, comparison_picture, sent_bytes_of_first_rank

    step, cluster, ranking = planned
    is_alone = request.layout is None and request.write is None
    check_input(is_alone, "--compare names layouts; leave --layout and --write out")
    check_writable(request.svg)
    plans, steps = [], [with_layout(step, layout, request.gpus) for layout in request.compared]
    for each in steps:
        plan, reason = ranking.predict(each)
        sent = {"sent_bytes": sent_bytes_of_first_rank(job, plan.step)}
        plans.append(_plan_report(plan, cluster, reason) | sent)
    note = assumptions(steps, cluster, request.headroom)
    if request.svg is not None:
        title = f"Layouts of {job.name} on {request.gpus} devices of {cluster.name}"
        write_file_atomically(request.svg, comparison_picture(plans, title=title, note=note).encode())
    if request.json:
        print_json({"cluster": cluster.name, "model": request.source, "gpus": request.gpus, "plans": plans})
    else:
        print_lines(*comparison_lines(plans), note)


def _write_job(path: Path, job: Job, step: PlannedStep) -> None:
    """Write the job with a layout, as `motet train` reads it."""
    from motet.train.launch.run_folder import job_to_tree

    check_writable(path)
    check_input(
        step.recompute in POLICY_OF_BLOCKS,
        f"--write: recompute = {step.recompute!r} belongs to other frameworks; leave --stack out",
    )
    check_input(
        step.states != "disk" or job.memory.folder is not None,
        f"--write: the layout '{step.layout_text}' keeps states on disk, and the job names no folder for them; add "
        "memory.optimizer=disk memory.folder=FOLDER",
    )
    memory = job.memory.with_optimizer(step.states).model_copy(update={"recompute": step.recompute})
    settings = parse_layout(str(step.layout))
    tree = job_to_tree(job.model_copy(update={"layout": settings, "memory": memory}))
    tree["run"] = {**tree.get("run", {}), "ranks": step.layout.ranks}
    head = f"# The job {job.name!r} with layout '{step.layout_text}', which `motet plan` chose.\n"
    write_file_atomically(path, (head + to_toml(tree)).encode())
    log(f"wrote {path}: the job with layout '{step.layout_text}'")


def parse_tokens(text: str) -> float:
    """A number of tokens: 15.6T, 300B or 1e12."""
    match = _TOKENS.fullmatch(text.strip())
    count = float(match[1]) * _SCALE[match[2].lower()] if match else 0.0
    check_input(0 < count < 1e18, f"--tokens {text!r} is not a number of tokens; write it as 15.6T, 300B or 1e12")
    return count


def parse_headroom(text: str) -> float:
    """The share of a device's memory that stays free: 5% or 0.05."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    check_input(0 <= share < 1, f"--headroom {text!r}: give a share of the memory such as 5% or 0.05, below 100%")
    return share


def _time_error(step: PlannedStep, cluster: PlannedCluster) -> float | None:
    return errors_on_device(cluster.device.name, cluster.devices, has_experts=step.has_experts)[0]


def _equal_within(error: float | None) -> float:
    """Layouts of one model differ by less than models do: the expected error counts up to a limit."""
    return min(_MOST_TOLERANCE, _MOST_TOLERANCE if error is None else error)


def planned_model(job: Job, file: Path | None) -> PlannedModel:
    """The settings of a known model, the spec of a file, or else the trace of the model."""
    if file is not None:
        return read_spec_file(file).spec
    if not isinstance(job.model, UserModuleSettings):
        return job.model
    if not job.model.trains_all:
        return trace_job(job)
    path = job.model.hf_path
    try:
        config = {} if path is None else {**read_config(path), **job.model.arguments}
        return settings_from_config(config)
    except InputError:
        if config.get("model_type") in known_model_types():
            raise
    return trace_job(job)


class TrainingRefusals:
    """The reason why motet cannot train a job with a layout, by the checks that refuse jobs.

    They see the degrees of the layout with few micro-batches and plain 1F1B: the planner makes no chunks and schedules
    that do not go together, and to make thousands of them takes minutes.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._known = job, dict[tuple[str, str, str], str | None]()

    def __call__(self, step: PlannedStep) -> str | None:
        """The refusal of a layout, or None."""
        layout = step.layout.with_sharding(microbatches=max(2, step.layout.pp))
        layout = replace(layout, schedule="1f1b", chunks=1, stages=())
        key = str(layout), step.recompute, step.states
        if key not in self._known:
            self._known[key] = self._checked(layout, step)
        return self._known[key]

    def _checked(self, layout: Layout, step: PlannedStep) -> str | None:
        if step.recompute not in POLICY_OF_BLOCKS:
            return f"recompute = {step.recompute!r} belongs to other frameworks"
        memory = self._job.memory.with_optimizer(step.states).model_copy(update={"recompute": step.recompute})
        data = self._job.data.model_copy(update={"batch_sequences": layout.dp * layout.microbatches})
        try:
            parts = {"layout": parse_layout(str(layout)), "memory": memory, "data": data}
            check_job(self._job.model_copy(update=parts), layout.ranks)
        except (InputError, ValueError) as error:
            return str(error)
        return None


def _report(
    request: PlanRequest, refusal: Refusal, ranked: tuple[PlannedCluster, Ranking], *, reason: str | None
) -> dict[str, Any]:
    cluster, outcome = ranked
    plans = []
    for number, kind in enumerate(outcome.kinds):
        row = _plan_report(kind.best, cluster, reason) | {"runs_today": refusal(kind.best.step) is None}
        place = {"next_step_time_s": kind.next_s, "equal": number < outcome.equal}
        plans.append(row | (place if request.layout is None else {}))
    report = {"cluster": cluster.name, "model": request.source, "gpus": request.gpus, "plans": plans}
    if outcome.untrained is None:
        return report | {"untrained": None}
    plan, problem = outcome.untrained
    return report | {"untrained": _plan_report(plan, cluster, None) | {"needs": problem}}


def _plan_report(plan: RankedPlan, cluster: PlannedCluster, reason: str | None) -> dict[str, Any]:
    step, seconds = plan.step, plan.time.seconds
    time_error, memory_error = errors_on_device(cluster.device.name, cluster.devices, has_experts=step.has_experts)
    if step.states != "device":
        time_error = memory_error = None  # No published step has its states elsewhere
    worst, per_host = plan.memory.worst, min(cluster.devices_per_host, cluster.devices)
    peak = product_peak(cluster.device, step.matmul)
    mfu = step.model_flops() / seconds / cluster.devices / peak if peak else None
    overhead = {"allocator": worst.reserved - worst.allocated, "context": worst.outside - worst.reserved}
    return {
        "layout": step.layout_text,
        "framework": step.block_stack.name,
        "runs_today": False,
        "fits": reason is None,
        "reason": reason,
        "step_time_s": seconds,
        "step_time_error": time_error,
        "tokens_per_s_per_gpu": step.tokens / seconds / cluster.devices,
        "mfu": mfu,
        "memory_bytes": dict(worst.bytes) | overhead | {"total": worst.outside},
        "memory_error": memory_error,
        "optimizer": step.states,
        "host_bytes": plan.memory.on_fullest_host("host", per_host),
        "disk_bytes": plan.memory.on_fullest_host("disk", per_host),
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
    plans, says_today = report["plans"], not all(plan["runs_today"] for plan in report["plans"])
    rows = [_row(number, plan, says_today=says_today) for number, plan in enumerate(plans, 1)]
    header = ("", "step", "next", "tokens/s/GPU", "MFU", "memory", *["today"] * says_today, "layout")
    yield from table_lines(rows, header=header, right=range(len(header) - 1))
    if request.layout is None:
        yield from _ranking_notes(report, outcome)
    for plan in report["plans"][:1]:
        parts = sorted(plan["time_s"].items(), key=lambda item: -item[1])
        yield "time of the first: " + ", ".join(f"{name} {value:.3g} s" for name, value in parts if value >= 1e-6)
        memory = (item for item in plan["memory_bytes"].items() if item[0] != "total" and item[1])
        yield "memory of the first: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in memory)
        for place in ("host", "disk"):
            if sizes := plan[f"{place}_bytes"]:
                shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
                yield f"{place} of the first, for all ranks of a host: {shown}"
        if plan["reason"]:
            yield f"it does not fit: {plan['reason']}"
    if request.layout is None:
        yield from _rejected_lines(outcome, shows_all=request.shows_rejected)


def _tier_note(ranking: LayoutRanking, cluster: PlannedCluster, outcome: Ranking, *, top: int) -> str:
    """Name the places off the devices that make layouts fit."""
    if outcome.tried:
        fit = [f"{count:,} fit with memory.optimizer={place}" for place, count in outcome.tried.items() if count]
        on_devices = any(plan.step.states == "device" for plan in outcome.plans)
        kinds = f"Fewer than {top} kinds of layouts fit" if on_devices else "No layout fits"
        return f"{kinds} with masters and moments on the devices; of the others, " + (
            f"{' and '.join(fit)} (`optimizer=` in their rows)." if fit else "none fits with them on the host either."
        )
    is_short = ranking.may_use_tiers and len(outcome.kinds) < top
    return _missing_host(ranking, cluster).strip("; ") if is_short else ""


def _missing_host(ranking: LayoutRanking, cluster: PlannedCluster) -> str:
    if not ranking.may_use_tiers or cluster.host is not None:
        return ""
    return f"; states on the host are not tried, because cluster {cluster.name} has no section [host]"


def _row(number: int, plan: dict[str, Any], *, says_today: bool) -> tuple[str, ...]:
    error, next_s = plan["step_time_error"], plan.get("next_step_time_s")
    return (
        f"{number}" + "=" * plan.get("equal", False),
        f"{plan['step_time_s']:.3g} s" + (f" ±{error:.0%}" if error is not None else ""),
        f"+{next_s / plan['step_time_s'] - 1:.1%}" if next_s is not None else "-",
        f"{plan['tokens_per_s_per_gpu']:.0f}",
        f"{plan['mfu']:.1%}" if plan["mfu"] is not None else "-",
        format_bytes(plan["memory_bytes"]["total"]),
        *(["yes" if plan["runs_today"] else "no"] * says_today),
        plan["layout"],
    )


def _ranking_notes(report: dict[str, Any], outcome: Ranking) -> Iterator[str]:
    """Explain the order of the rows, and name a faster layout that cannot be trained."""
    error = report["plans"][0]["step_time_error"]
    tolerance = _equal_within(error)
    known = f"±{error:.0%}" if error is not None else "not known"
    yield (
        "Each row is the fastest layout with its tp, pp, cp, ep and stage of ZeRO; `next` is how much slower the "
        "second one is."
    )
    if outcome.equal > 1:
        yield (
            f"Rows with = are equal: they are within {tolerance:.0%} of the fastest, and the expected error is "
            f"{known}. The simplest comes first, then the one that leaves the most memory free."
        )
    if (untrained := report["untrained"]) is not None:
        fastest = min(plan["step_time_s"] for plan in report["plans"])
        gain = fastest / untrained["step_time_s"] - 1
        yield (
            f"A layout that this version does not train would be {gain:.1%} faster than the fastest row: "
            f"{untrained['layout']} ({untrained['needs']}); --all ranks such layouts too."
        )
    elif not all(plan["runs_today"] for plan in report["plans"]):
        yield "This version trains those with `yes` under `today`."


def _cost_line(plan: dict[str, Any], tokens: str | None, cluster: PlannedCluster) -> str:
    costs = [f"{plan['gpu_hours']:,.0f} GPU-hours"]
    price, power = cluster.device.price_per_hour, cluster.device.power_W
    if power is not None:
        costs.append(f"{plan['energy_kWh'] / 1000:,.3g} MWh at {power.value:g} W for each device ({power.origin})")
    if price is not None:
        costs.append(f"{plan['usd']:,.0f} USD at {price.value:g} for each GPU-hour ({price.origin})")
    duration = f"{plan['days']:,.1f} days" if plan["days"] >= _LONG_DAYS else format_duration(plan["days"] * 86400)
    return f"{tokens} tokens take {duration} with the first: {', '.join(costs)}"


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
