"""The rows of scripts/gpu.py without a GPU: failures that are planted, and figures next to their aims."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import pytest
import torch
from gpu_checks import model_rows, parity_rows, pool, speed_rows
from gpu_checks.in_place_kernels import IN_PLACE, measure_in_place
from gpu_checks.pool import Pool, WorkerError
from gpu_checks.rows import LeftOutError, Outcome, Report, Row, Section
from gpu_checks.training import Trained, train_with_triton

from motet.train import build

FACTS = {"device": "A", "torch": "2", "cores": "1", "platform": "P", "commit": "c"}


def raise_error(text: str) -> None:
    raise RuntimeError(text)


def answer(value: int) -> int:
    return value


def report_with(tmp_path: Path, rows: dict[str, dict[str, Any]] | None = None) -> Report:
    workers: Any = SimpleNamespace(keep=lambda count: None)
    report = Report(tmp_path / "rows.json", FACTS, workers, 300)
    report.rows = {name: {"state": "done", "holds": None, "values": values} for name, values in (rows or {}).items()}
    return report


# --- rows that fail ------------------------------------------------------------------------------------


def test_a_row_that_fails_is_on_the_page_and_costs_no_other(tmp_path: Path) -> None:
    def fail(error: Exception, report: Report) -> Outcome:
        raise error

    def count(report: Report) -> Outcome:
        return Outcome(f"{len(report.rows)} rows before")

    rows = [
        Row("ended", 1, partial(fail, WorkerError("worker 0 ended"))),
        Row("defect", 1, partial(fail, KeyError("x"))),
        Row("absent", 1, partial(fail, LeftOutError("no y"))),
        Row("long", 1000, count),
        Row("good", 1, lambda report: Outcome("3 of 2", holds=True)),
        Row("summary", 0, count),
    ]
    sections, report = [Section("first", 300, rows[:3]), Section("second", 0, rows[3:])], report_with(tmp_path)
    page = tmp_path / "page.md"
    report.end_s = report.begin_s + 2  # Little time, but a row without a time always runs
    gpu.run_all(report, sections, gpu.PageWriter(page, sections, ""), is_complete=False)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ") and "result" not in line]
    assert lines[:3] == [
        "| ended | failed: worker 0 ended | **does not hold** |",
        "| defect | failed: KeyError: 'x' | **does not hold** |",
        "| absent | left out: no y |  |",
    ]
    assert lines[3].startswith("| long | left out: ") and "it takes about 1000 s" in lines[3]
    assert lines[4:] == ["| good | 3 of 2 | holds |", "| summary | 5 rows before |  |"]
    report.run(rows[-1], report.begin_s - 1)
    assert report.rows["summary"]["result"] == "6 rows before"  # It reads the rows again


def test_the_default_time_has_room_for_a_row_of_each_section_that_has_a_share(tmp_path: Path) -> None:
    sections = gpu.sections_for("cuda", str(tmp_path))
    assert sum(section.share_s for section in sections) == gpu.PLANNED_SECONDS
    shared = [section for section in sections if section.share_s]
    assert all(section.share_s >= max(row.estimate_s for row in section.rows) for section in shared)
    planned = [
        row.name
        for section in shared
        for row in section.rows
        if row.name in {**model_rows.MODELS, **model_rows.PLANNED}
    ]
    assert len(planned) >= model_rows.PLANNED_RUNS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Workers of a device whose CUDA is planted, as threads."""
    threads = list[threading.Thread]()

    def new_worker(self: Pool) -> tuple[Any, Connection]:
        ours, theirs = Pipe()

        def run() -> None:
            try:
                pool.serve(theirs, "cuda", 1)
            except (RuntimeError, OSError):
                pass
            finally:
                theirs.close()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return SimpleNamespace(kill=lambda: None, join=lambda timeout=None: None, exitcode=1), ours

    monkeypatch.setattr(Pool, "_new_worker", new_worker)
    monkeypatch.setattr(pool, "gc", SimpleNamespace(collect=lambda: 0))  # Takes seconds among all tests' objects
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    yield threads
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_the_text_of_an_error_arrives_although_cleaning_fails_after_it(
    started: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Pool("cuda", 1)
    assert workers.call(answer, 1, timeout_s=60) == 1 and len(started) == 1
    with monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "empty_cache", partial(raise_error, "CUDA is broken"))
        with pytest.raises(WorkerError, match="RuntimeError: an illegal access"):
            workers.call(raise_error, "an illegal access", timeout_s=60)
        started[0].join(60)
    assert workers.call(answer, 2, timeout_s=60) == 2 and len(started) == 2  # In a new worker
    workers.keep(0)


@pytest.mark.parametrize(
    ("text", "count"),
    [("CUDA error: misaligned", 2), ("Triton Error [CUDA]: misaligned", 2), ("CUDA out of memory", 1)],
)
def test_a_worker_whose_context_is_broken_is_replaced(started: list[threading.Thread], text: str, count: int) -> None:
    workers = Pool("cuda", 1)
    with pytest.raises(WorkerError, match="RuntimeError: "):
        workers.call(raise_error, text, timeout_s=60)
    assert workers.call(answer, 2, timeout_s=60) == 2 and len(started) == count
    workers.keep(0)


def test_torch_warns_of_synchronizations_no_more_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[str]()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError), model_rows._synchronizations_warn("cuda"):
        raise_error("of a step")
    assert modes == ["warn", "default"]


# --- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", IN_PLACE)
def test_wrong_losses_and_an_update_without_effect_are_errors(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    ways = IN_PLACE[kernel]("cpu", 3)

    def error_with(way: Callable[[list[Any]], object]) -> float:
        monkeypatch.setitem(IN_PLACE, kernel, lambda device, tokens: ways._replace(triton=way))
        error: float = measure_in_place("cpu", kernel, 3, compiles=False)["error"]
        return error

    def wrong(tensors: list[Any]) -> object:
        return ways.torch(tensors) * 1.001 if kernel == "cross_entropy" else None

    def not_finite(tensors: list[Any]) -> object:
        result = ways.torch(tensors)
        tensors[-1].view(-1)[1] = math.nan
        return result

    assert error_with(ways.torch) == 0
    assert error_with(wrong) > 1 and math.isnan(error_with(not_finite))


def test_a_way_that_fails_keeps_the_times_of_the_others() -> None:
    ways = {"compiled": partial(raise_error, "no graph\nlong text"), "triton": lambda: None}
    seconds, problems = speed_rows.seconds_of_ways(ways, "cpu", 1)
    assert seconds.keys() == {"triton"} and problems == {"compiled": "RuntimeError: no graph"}


def test_the_row_of_a_kernel_has_its_aim(tmp_path: Path) -> None:
    from gpu_checks.kernel_rows import TOKENS, _kernel

    measured = {
        "seconds": {"torch": 2e-3, "triton": 1e-3},
        "problems": {"compiled": "RuntimeError: x"},
        "error": 0.5,
        "nbytes": 7e9,
    }
    report: Any = report_with(tmp_path, {speed_rows.BANDWIDTH_ROW: {"Bps": 1e13}})
    report.call = lambda *arguments: measured
    few, many = (_kernel("cuda", "rotary", tokens, report) for tokens in TOKENS["cuda"])
    assert few.holds and many.holds is False and "aim" not in few.result
    assert many.result == (
        "forward and backward: torch 2000 us (2 x triton), triton 1000 us; compiled not measured: RuntimeError: x; "
        "error 0.5 of what rounding allows; 70% of the measured bandwidth (aim 80%)"
    )
    measured |= {"error": math.inf, "seconds": {"torch": 1.0}}
    assert _kernel("cuda", "rotary", TOKENS["cuda"][0], report).holds is False


# --- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launched", "graphs"), [(parity_rows.TRITON_KERNELS, 1), (["rotate_pairs"], 0)])
def test_training_by_kernels_and_by_graphs_must_have_used_them(tmp_path: Path, launched: set[str], graphs: int) -> None:
    exact, rounded = (Trained([loss], [1.0], {}, 1.0) for loss in (1.0, 1.01))

    def call(function: Any, place: Any, device: str, folder: str, overrides: list[str], model: str) -> Trained:
        if device == "cpu":
            assert parity_rows.COMPILED not in overrides
            return rounded if any("precision" in each for each in overrides) else exact
        is_triton = function is train_with_triton
        return replace(
            rounded, launched=frozenset(launched) if is_triton else frozenset(), graphs=0 if is_triton else graphs
        )

    report: Any = report_with(tmp_path)
    report.call = call
    parity_rows._references.clear()
    outcomes = [parity_rows._triton("cuda", "", "bf16", report), parity_rows._compiled("cuda", "", report)]
    parity_rows._references.clear()
    assert [outcome.holds for outcome in outcomes] == [graphs == 1] * 2
    assert ("1 of 8 kernels ran; adamw_elements did not" in outcomes[0].result) == (graphs == 0)


def test_blocks_and_models_run_by_the_attention_kernels_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[bool]()

    @contextmanager
    def context(job: Any, device: Any) -> Iterator[None]:
        entered.append(True)
        yield
        entered[-1] = False

    monkeypatch.setattr(build, "precision_context", context)
    monkeypatch.setattr(speed_rows, "seconds_of", lambda step, device: float(entered == [True]))
    assert speed_rows.block_seconds("cpu", "1 B", 8, 1)[0] == 1 and entered == [False]
    monkeypatch.setattr(model_rows, "_train_job", lambda *arguments: {"is inside": entered == [False, True]})
    case = model_rows.Case("1 B", 1, 1, 1)
    assert model_rows.train_model("cpu", case, 1)["is inside"] and entered == [False, False]


# --- aims ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "holds"), [(0.61, True), (0.59, False)])
def test_a_block_of_8_b_has_its_aim(tmp_path: Path, share: float, holds: bool) -> None:
    report: Any = report_with(tmp_path, {speed_rows.PEAK_ROW: {"flops": 1e15}})
    report.call = lambda *arguments: (1e-3, share * 1e12)
    blocks = [speed_rows._block("cuda", shape, 4096, report, compiles=True) for shape in ("8 B", "1 B")]
    assert [block.holds for block in blocks] == [holds, None]
    assert blocks[0].result.endswith(f"{share:.1%} of the measured peak (aim 60%)")


def planned(time: float, memory: float | None) -> dict[str, Any]:
    return {
        "seconds": 1.0,
        "predicted_s": 1 + time,
        "peak_bytes": 2**30,
        "predicted_bytes": memory and (1 + memory) * 2**30,
    }


def test_the_plan_has_its_aims_on_six_runs(tmp_path: Path) -> None:
    names = [*model_rows.MODELS, *model_rows.PLANNED]
    report = report_with(tmp_path, dict.fromkeys(names, planned(-0.09, 0.02)))
    every = model_rows._plan_of_all("cuda", report)
    assert every.holds and every.result == "6 runs: time within 9.0% (aim 10%), memory within 2.0% (aim 3%)"
    row = model_rows._plan_of_row("cuda", names[0], report)
    assert row.holds and row.result == (
        "0.91 s planned for 1 s (-9.0%, aim 10%); 1.02 GiB planned for 1.00 GiB (+2.0%, aim 3%)"
    )
    for values in (planned(0.11, 0.02), planned(0.0, -0.04), planned(0.0, None)):
        report.rows[names[0]]["values"] = values
        assert model_rows._plan_of_row("cuda", names[0], report).holds is False
        assert model_rows._plan_of_all("cuda", report).holds is False
    del report.rows[names[0]]
    few = model_rows._plan_of_all("cuda", report)
    assert few.holds is False and few.result.startswith("5 runs")
    assert model_rows._plan_of_all("cpu", report).holds is None


def test_peers_are_compared_with_the_aims() -> None:
    import gpu_peers

    times = {"motet": [2.0] * 3, "motet, compiled blocks": [1.0] * 3, "slow": [3.0] * 3, "fast": [1.04, 1.1, 1.2]}
    assert gpu_peers.aims(times, 0.59, is_checked=True) == [
        "aim 60% of the measured peak: 59.0% by motet, compiled blocks: DOES NOT HOLD",
        "aim 1.05x the best peer: 1.10x (1.07 to 1.15) by motet, compiled blocks over fast: holds",
    ]
    alone = gpu_peers.aims({"motet": [1.0]}, 0.7, is_checked=True)
    assert alone[0].endswith("holds") and alone[1].endswith("not checked: no peer ran")
    assert gpu_peers.aims(times, 0.7, is_checked=False)[0].endswith("not checked: no GPU")


def test_a_peer_that_fails_in_a_round_is_left_out() -> None:
    import gpu_peers

    calls = iter(range(9))

    def fail_later() -> int:
        return next(calls) if next(calls) < 2 else raise_error("CUDA out of memory\nTried") or 0

    turns: dict[str, Callable[[], int]] = {"good": lambda: 1, "bad": fail_later}
    results, failed = gpu_peers.take_turns(turns, SimpleNamespace(rounds=4))
    assert results == {"good": [1] * 4} and failed == {"bad": "it failed: RuntimeError: CUDA out of memory"}


def test_names_that_liger_replaces_are_restored() -> None:
    from parts.gpu_contenders import unpatched_after

    causal = type("LlamaForCausalLM", (), {"forward": answer})
    module = SimpleNamespace(apply_rotary_pos_emb=answer, LlamaForCausalLM=causal)
    with pytest.raises(RuntimeError), unpatched_after(module):
        module.apply_rotary_pos_emb = causal.forward = raise_error
        raise_error("of a step")
    assert module.apply_rotary_pos_emb is answer and causal.forward is answer
