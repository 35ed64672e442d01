"""Rows of whole training steps: waits of the host, tokens a second of models, and both against the plan."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_checks import training
from gpu_checks.rows import LeftOutError, Outcome, Report, Row
from gpu_checks.speed_rows import PEAK_ROW, job_of_shape

MAX_WAITS = 1  # The law: one copy of agreed scalars in a step
TIME_AIM, MEMORY_AIM, PLANNED_RUNS = 0.1, 0.03, 6  # Largest errors of the plan, and the runs that it needs at least
_WARM_UP, _STEPS = 2, 4
_TINY_CASES = {"decoder": [], "GPT-2": ["memory.recompute=full"], "T5": [], "BERT": []}


@dataclass(frozen=True)
class Case:
    """A model of a shape, and the settings of its training."""

    shape: str
    rows: int
    microbatches: int
    length: float  # Length of a row, in units of 4096 tokens
    recompute: str = "none"
    more: tuple[str, ...] = ()  # Other settings
    # Bytes for each parameter on the device and on the host; with them the model has as many blocks as there is room
    # for. Pinned memory of the sums, which torch rounds up to powers of two, may have twice the 4 bytes of a sum.
    bytes_of_places: tuple[int, int] | None = None


MODELS = {
    "1.5 B, 4 micro-batches of 4096 tokens": Case("1 B", 4, 4, 1),
    "1.5 B, 4 micro-batches of 4096 tokens, compiled": Case("1 B", 4, 4, 1, more=("run.compile=blocks",)),
    "3.6 B, 4 micro-batches of 4096 tokens, full recomputation": Case("3 B", 4, 4, 1, "full"),
}
PLANNED = {
    "1.5 B, rows of 8192 tokens, full recomputation": Case("1 B", 2, 2, 2, "full"),
    "1.5 B, micro-batches of 4 rows of 2048 tokens, selective recomputation": Case("1 B", 8, 2, 0.5, "selective"),
    "1.5 B, one micro-batch of 2 rows": Case("1 B", 2, 1, 1),
}
HOST_MODELS = {
    "8 B, optimizer on the host": Case(
        *("8 B", 8, 8, 1, "full"),
        more=("layout.zero=1", "memory.optimizer=host", "communication.overlap=forward"),
        bytes_of_places=(6, 20),
    ),
    "8 B, parameters and optimizer on the host": Case(
        *("8 B", 2, 1, 1, "full"),
        more=("layout.zero=3", "memory.optimizer=host", "memory.parameters=host"),
        bytes_of_places=(1, 20),
    ),
    "8 B, optimizer and activations on the host": Case(
        *("8 B", 8, 8, 1, "full"),
        more=("layout.zero=1", "memory.optimizer=host", "memory.activations=host"),
        bytes_of_places=(6, 20),
    ),
    "8 B, states on the device": Case("8 B", 8, 8, 1, "full", bytes_of_places=(18, 0)),
}
_HOST_STEPS = 2
_SHARE_OF_MEMORY = 0.85  # The rest is that of torch, activations and the processes of the checks
_ADAMW_BYTES = 12


# --- waits -----------------------------------------------------------------------------------------


def waits_of_a_step(device: str, folder: str, overrides: list[str], model: str) -> dict[str, int]:
    """The places at which the host waits for the device in a step, with the numbers of waits."""
    import torch

    from motet.parallel.process.process_group import RankGroup
    from motet.train.build import build_components, precision_context

    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    settings = ["precision.recipe=bf16", "layout.microbatches=4", *overrides]
    job = training.small_job(folder, device, settings, model)
    with precision_context(job, where):
        parts = build_components(job, RankGroup(0, 1, None, where), Path(folder, "waits"))
        stepper = parts.make_train_step(job)
        for step in range(_WARM_UP):
            stepper.step(step, 1e-3)
        with warnings.catch_warnings(record=True) as seen, _synchronizations_warn(device):
            warnings.simplefilter("always")
            stepper.step(_WARM_UP, 1e-3)
    waits = [each for each in seen if str(each.message).startswith("called a synchronizing")]
    return dict(Counter(f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}" for each in waits))


@contextmanager
def _synchronizations_warn(device: str) -> Iterator[None]:
    """Let torch warn where the host waits for the device, and never after an exception."""
    import torch

    try:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def wait_rows(device: str, folder: str) -> list[Row]:
    return [
        Row(f"{model}: waits of the host in a step", 3, partial(_waits, device, folder, overrides, model))
        for model, overrides in _TINY_CASES.items()
    ]


def _waits(device: str, folder: str, overrides: list[str], model: str, report: Report) -> Outcome:
    places = report.call(waits_of_a_step, device, folder, overrides, model)
    if device != "cuda":
        return Outcome("not checked: a CPU has no queue of kernels")
    count, most = sum(places.values()), sorted(places.items(), key=lambda pair: -pair[1])
    result = "; ".join([f"{count} in 4 micro-batches", *(f"{place} {times} x" for place, times in most[:8])])
    return Outcome(result, count <= MAX_WAITS, {"places": places})


# --- models ----------------------------------------------------------------------------------------


class _DrawnOnDevice:
    """Initial values of a model, drawn on the device: millions a millisecond, with other bits than in a run."""

    fingerprint = ""

    def __init__(self, settings: Any, device: Any) -> None:
        self._settings, self._device = settings, device

    def open(self, name: str) -> Any:
        import torch

        from motet.models.weight_init import init_rule_for

        rule = init_rule_for(self._settings, name)
        scale = rule.std / rule.divisor if rule.std else 0.0
        return lambda box: torch.randn(box[1], device=self._device).mul_(scale).add_(0.0 if rule.std else rule.value)


class _RandomBatches:
    """Rows of random tokens, as long as the job says."""

    def __init__(self, job: Any) -> None:
        self._vocabulary, self._length = job.model.vocab_size, job.data.sequence_length

    def batch(self, step: int, rows: range) -> Any:
        import torch

        from motet.core.batch import Batch

        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self._vocabulary, (len(rows), self._length + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Batch(inputs, targets, torch.ones(targets.shape), torch.tensor([*rows]))


def job_of_case(device: str, case: Case) -> Any:
    """The job of a case, with all blocks of its shape or as many as there is room for."""
    make = partial(job_of_shape, device, case.shape, case.rows, case.microbatches, case.length, case.recompute)
    job = make(more=case.more)
    if case.bytes_of_places is None or device != "cuda":
        return job
    import torch

    from motet.cluster.host_limits import read_memory_limits
    from motet.models.spec.model_spec import spec_from_settings

    rooms = torch.cuda.mem_get_info()[0], min(limit.total_bytes for limit in read_memory_limits())
    per_parameter = zip(rooms, case.bytes_of_places, strict=True)
    most = _SHARE_OF_MEMORY * min(room / size for room, size in per_parameter if size)
    one, two = (
        spec_from_settings(job.model.model_copy(update={"layers": layers})).parameter_count for layers in (1, 2)
    )
    layers = min(job.model.layers, 1 + int((most - one) / (two - one)))
    return make(more=[*case.more, f"model.layers={layers}"])


def transfer_parts(engine: Any, steps: int, device: Any) -> dict[str, float]:
    """The seconds of a step on the links to and from the host, and of the update by its cores, at measured rates."""
    from motet.cluster.local_device import measure_host

    if engine.optimizer.states is None:
        return {}
    host = measure_host(1, device=device)
    names = "sums and activations to the host", "values, rows and activations to the device"
    parts = {
        name: sent / steps / host["link_Bps"]["value"]
        for name, sent in zip(names, training.sent_bytes(engine), strict=True)
    }
    states = _ADAMW_BYTES * engine.plan.inventory.parameter_count
    return parts | {"update by the host": states / host["update_Bps"]["value"]}


def train_model(device: str, case: Case, steps: int) -> dict[str, Any]:
    """Median seconds and peak bytes of a step, its FLOPs and tokens, and the planner's prediction."""
    import torch

    from motet.train.build import precision_context

    job, where = job_of_case(device, case), torch.device(device, 0) if device == "cuda" else torch.device(device)
    with precision_context(job, where):
        return _train_job(job, where, case, steps)


def _train_job(job: Any, where: Any, case: Case, steps: int) -> dict[str, Any]:
    import torch

    from motet.memory.policy_choice import MemorySettings
    from motet.models.build import build_trainable_model
    from motet.parallel.process.process_group import RankGroup
    from motet.train.engine import build_engine
    from motet.train.forecast.step_forecast import predict_step
    from motet.train.job import training_flops
    from motet.train.step import MicroBatchLoop, TrainStep

    group, layout, is_cuda = RankGroup(0, 1, None, where), job.layout_for(1), where.type == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = build_trainable_model(job.model, 0, torch.float32, where, on_meta=True)
    values = _DrawnOnDevice(job.model, where)
    engine = build_engine(model.module, group, layout=layout, settings=job, batch_sequences=case.rows, values=values)
    model = replace(model, loss_sum=engine.optimizer.sharded_parameters.wrap_as_forward(model.loss_sum))
    stepper = TrainStep(engine, MicroBatchLoop(model, _RandomBatches(job), engine, layout, case.rows))
    times, losses = list[float](), list[float]()
    for step in range(_WARM_UP + steps):
        start_s = perf_counter()
        losses.append(stepper.step(step, 1e-4).loss)
        if is_cuda:
            torch.cuda.synchronize()
        times.append(perf_counter() - start_s)
    stages = engine.plan.model_sharding.stages
    predicted = predict_step(job, layout, stages, device=where)
    on_device = job.model_copy(update={"memory": MemorySettings(recompute=job.memory.recompute)})
    computed = predict_step(on_device, layout, stages, device=where) if case.more else None
    peak = torch.cuda.max_memory_allocated() - before if is_cuda else None
    parameters = engine.plan.inventory.parameter_count
    return {
        "seconds": sorted(times[_WARM_UP:])[steps // 2], "times": times, "losses": losses, "peak_bytes": peak,
        "tokens": case.rows * job.data.sequence_length, "flops": training_flops(job), "parameters": parameters,
        "predicted_s": predicted.step_time_s if predicted else None,
        "predicted_bytes": predicted.live_bytes if predicted else None,
        "transfer_parts": transfer_parts(engine, _WARM_UP + steps, where),
        "computed_s": computed.step_time_s if computed else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
    }  # fmt: skip


def model_rows(device: str) -> list[Row]:
    """Models whose state nearly fills a device of 80 GB, and small ones."""
    return [Row(name, _estimate_s(case), partial(_model, device, case)) for name, case in MODELS.items()]


def _estimate_s(case: Case) -> float:
    if "run.compile=blocks" in case.more:
        return 40  # Most of it is the first compilation
    return 15 if case.shape == "1 B" else 25


def plan_rows(device: str) -> list[Row]:
    """The models above, and other ways to train one, against the planner."""
    known = [Row(f"plan of {name}", 0, partial(_plan_of_row, device, name)) for name in MODELS]
    rows = [*known, *(Row(name, 12, partial(_planned_model, device, case)) for name, case in PLANNED.items())]
    return [*rows, Row(f"plan of at least {PLANNED_RUNS} runs", 0, partial(_plan_of_all, device))]


def _model(device: str, case: Case, report: Report) -> Outcome:
    values = report.call(train_model, device, case, _STEPS)
    return Outcome(_speed_of(values, report), _learns(values["losses"]), values)


def host_model_rows(device: str) -> list[Row]:
    """The largest models of a shape with states in each place."""
    return [Row(name, 60, partial(_host_model, device, case)) for name, case in HOST_MODELS.items()]


def _host_model(device: str, case: Case, report: Report) -> Outcome:
    values = report.call(train_model, device, case, _HOST_STEPS)
    parts = {**({"compute": values["computed_s"]} if values["computed_s"] else {}), **values["transfer_parts"]}
    texts = [_speed_of(values, report), _against_plan(device, values).result]
    if parts:
        texts.append(", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items()))
        texts.append(f"{values['seconds'] / max(parts.values()):.3g} times the longest part")
    return Outcome("; ".join(texts), _learns(values["losses"]), values)


def _speed_of(values: dict[str, Any], report: Report) -> str:
    peak, seconds = report.value(PEAK_ROW, "flops"), values["seconds"]
    share = f", {values['flops'] / seconds / peak:.1%} of the measured peak" if peak else ""
    memory = f", peak memory {values['peak_bytes'] / 2**30:.1f} GiB" if values["peak_bytes"] else ""
    parameters = f"{values['parameters'] / 1e9:.2f} billion parameters"
    return f"{parameters}, {values['tokens'] / seconds:,.0f} tokens/s, {seconds:.4g} s a step{share}{memory}"


def _learns(losses: list[float]) -> bool:
    """Whether the loss is finite and near that of equal chances: random tokens cannot be learned."""
    return all(0 < loss < 2 * losses[0] for loss in losses)


def _plan_of_row(device: str, name: str, report: Report) -> Outcome:
    values = report.rows.get(name, {}).get("values")
    if not values:
        raise LeftOutError(f"{name!r} has no values")
    return _against_plan(device, values)


def _planned_model(device: str, case: Case, report: Report) -> Outcome:
    values = report.call(train_model, device, case, _STEPS)
    outcome = _against_plan(device, values)
    return Outcome(f"{outcome.result}; {_speed_of(values, report)}", outcome.holds, values)


def _plan_errors(values: dict[str, Any]) -> tuple[float, float]:
    """The relative errors of the planned time and memory of a run; infinite where one is not planned or measured."""
    pairs = (values["predicted_s"], values["seconds"]), (values["predicted_bytes"], values["peak_bytes"])
    time, memory = (planned / measured - 1 if planned and measured else math.inf for planned, measured in pairs)
    return time, memory


def _holds(device: str, time: float, memory: float) -> bool | None:
    return abs(time) <= TIME_AIM and abs(memory) <= MEMORY_AIM if device == "cuda" else None


def _against_plan(device: str, values: dict[str, Any]) -> Outcome:
    texts, (time, memory) = [], _plan_errors(values)
    if time < math.inf:
        planned = f"{values['predicted_s']:.4g} s planned for {values['seconds']:.4g} s"
        texts.append(f"{planned} ({time:+.1%}, aim {TIME_AIM:.0%})")
    if memory < math.inf:
        planned, measured = (values[name] / 2**30 for name in ("predicted_bytes", "peak_bytes"))
        texts.append(f"{planned:.2f} GiB planned for {measured:.2f} GiB ({memory:+.1%}, aim {MEMORY_AIM:.0%})")
    return Outcome("; ".join(texts) or "the planner knows no such step", _holds(device, time, memory))


def _plan_of_all(device: str, report: Report) -> Outcome:
    """The largest errors of the plan over all runs that are measured."""
    names = [name for name in (*MODELS, *PLANNED) if report.value(name, "seconds")]
    if not names:
        raise LeftOutError("no run is measured")
    errors = zip(*(map(abs, _plan_errors(report.rows[name]["values"])) for name in names), strict=True)
    time, memory = map(max, errors)
    worst = (f"within {error:.1%}" if error < math.inf else "not known" for error in (time, memory))
    aims = f"time {next(worst)} (aim {TIME_AIM:.0%}), memory {next(worst)} (aim {MEMORY_AIM:.0%})"
    is_enough = None if device != "cuda" else len(names) >= PLANNED_RUNS
    return Outcome(f"{len(names)} runs: {aims}", is_enough and _holds(device, time, memory))
