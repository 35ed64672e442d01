"""Steps in which blocks are compiled are no part of the medians of a run."""

from motet.monitor.events import RunStarted, StepDone
from motet.monitor.summary import summarize


def run_of(seconds: list[float], graphs: list[int]) -> list[RunStarted | StepDone]:
    start = RunStarted(time=0.0, name="run", ranks=1, threads=1, device="CPU", parameters=1, data="", last_step=9)
    steps = [
        StepDone(
            time=0.0, step=i + 1, loss=1.0, target_tokens=8, tokens=8, learning_rate=0.1, step_time_s=s,
            tokens_per_s=8 / s, memory_bytes=1, compiled_graphs=count, mfu=0.1 / s,
        )
        for i, (s, count) in enumerate(zip(seconds, graphs, strict=True))
    ]  # fmt: skip
    return [start, *steps]


def test_medians_leave_steps_out_that_compile() -> None:
    summary = summarize(run_of([60.0, 2.0, 30.0, 4.0, 5.0], [2, 0, 1, 0, 0]))
    assert (summary.step_time_s, summary.tokens_per_s, summary.mfu) == (4.0, 2.0, 0.025)
    assert summary.tokens == 40


def test_a_run_that_only_compiled_has_medians() -> None:
    assert summarize(run_of([60.0, 20.0], [2, 1])).step_time_s == 40.0
