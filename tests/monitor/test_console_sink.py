"""Output for people: printed in one place, plain lines in a pipe, on a terminal a live line that nothing breaks."""

import io
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

from example_events import ended, evaluated, measured, started, step
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from motet.monitor.console_sink import ConsoleSink, checkpoint_line, seconds_left, start_lines, step_line
from motet.monitor.events import CheckpointSaved, ProfileSaved, ReplicaCheckDone, TextSampled, WarningIssued
from motet.monitor.sinks import JsonlSink
from motet.monitor.stdout_stderr import encode_nonfinite_floats, print_json, stderr_console, stdout_console


def run(folder, events, screen=None):
    """Keep and show the events, as a monitor would."""
    sinks = [JsonlSink(folder), ConsoleSink(folder, screen)]
    for event in events:
        for sink in sinks:
            sink.on_event(event)
    for sink in sinks:
        sink.close()


def on_screen(output):
    """The lines that a terminal shows in the end, and those that are left empty below them."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            count, letter = token[2:-1], token[-1]
            if letter == "A":
                row -= int(count or 1)
            elif letter == "K":
                lines[row] = ""
            else:
                assert letter in "mhl", token
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def terminal(monkeypatch, width=100):
    """A stream that is stdout and stderr, and a console on it; no fixture, for pytest takes over the streams later."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream, Console(force_terminal=True, width=width, _environ={"TERM": "xterm-256color"}, markup=False)


def test_the_line_of_a_step_names_the_worst_layer_of_its_experts(tmp_path, capsys):
    run(
        tmp_path, [started(), measured(1, (3, 1), (2, 2)), step(1), step(2), measured(3, (1, 3), dropped=1200), step(3)]
    )
    lines = capsys.readouterr().out.splitlines()
    ends = [line.partition("lr 1.00e-03")[2].strip() for line in lines if line.startswith("step")]
    assert ends == ["fullest expert 1.50 x mean in a", "", "fullest expert 1.50 x mean in a, 1,200 dropped"]


def test_a_pipe_gets_one_plain_line_per_told_step(tmp_path, capsys):
    long = tmp_path / ("a-long-name-" * 8)
    run(long, [started(), *(step(n, mfu=0.412, grad_norm=1.25) for n in range(1, 5)), evaluated(4), ended()])
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "tiny: 4.21 M parameters on 2 ranks x 1 thread, a CPU",
        "a model that knows nothing has loss ln(4096) = 8.3178",
        "4 steps",
        f"checkpoints only at the end, in {long}/checkpoints",
        "step 1/4  loss 7.5000  200 tokens/s  41.2% of peak  1 GiB  1.5 s left  grad 1.25  lr 1.00e-03",
        "step 2/4  loss 6.5000  200 tokens/s  41.2% of peak  1 GiB  4 s left  grad 1.25  lr 1.00e-03",
        "step 3/4  loss 5.5000  200 tokens/s  41.2% of peak  1 GiB  2 s left  grad 1.25  lr 1.00e-03",
        "step 4/4  loss 4.5000  200 tokens/s  41.2% of peak  1 GiB  grad 1.25  lr 1.00e-03",
        "validation after step 4: loss 5.0000",
        "",
        "finished      4 of 4 steps",
        "loss          7.5000 -> 4.5000   (ln(4096) = 8.3178)",
        "validation    loss 5.0000",
        "median        200 tokens/s, 41.2% of peak",
        "tokens        400",
        "peak memory   1 GiB",
        f"run folder    {long}",
    ]


def test_a_pipeline_says_which_stages_hold_most_and_compute_longest(tmp_path, capsys):
    usages = [
        {"stages": s, "memory_bytes": b, "compute_s": c} for s, b, c in (((0, 3), 2**28, 0.3), ((1, 2), 2**29, 0.1))
    ]
    later = [usages[0], {**usages[1], "memory_bytes": 2**30, "compute_s": 0.2}]
    seen = (1, 2**29, usages), (2, 2**30, later)
    steps = [step(n, memory_bytes=m, memory_rank=3, pipeline=u) for n, m, u in seen]
    run(tmp_path, [started(), *steps, ended()])
    out = capsys.readouterr().out
    for line in (
        "step 2/4  loss 6.5000  200 tokens/s  1 GiB on rank 3 (stages 1, 2)  4 s left  lr 1.00e-03",
        "peak memory   1 GiB on rank 3 (stages 1, 2)",
        "stages 0, 3   256 MiB, computes 60% of a step",
        "stages 1, 2   1 GiB, computes 30% of a step",
    ):
        assert f"{line}\n" in out


def test_everything_else_is_told_as_it_is(tmp_path, capsys):
    happened = [
        started(num_classes=None, ranks=1, first_step=3, resumed_from="checkpoints/step-00000002"),
        WarningIssued(text="data.workers = [cpu] is [bold]odd[/bold] :smile:"),
        step(3, skipped=True, loss=float("nan")),
        CheckpointSaved(
            step=3, path="checkpoints/step-00000003", size_bytes=3 * 1024**2, duration_s=0.25, stall_s=0.01
        ),
        ReplicaCheckDone(step=3, ranks=2, same_machines=True, violations=("rank 1 has [other] rows",), duration_s=0.1),
        ProfileSaved(first_step=3, last_step=3, path="profile-steps-3-3.json"),
        evaluated(3, perplexity=148.41, accuracy=0.5),
        TextSampled(step=3, prompt="Once [upon]", text=" a time\nthere"),
        ended(reason="save_failed", steps=3),
    ]
    run(tmp_path, happened)
    out = capsys.readouterr().out
    for line in (
        "tiny: 4.21 M parameters on 1 rank x 1 thread, a CPU",
        "resumed from checkpoints/step-00000002; next is step 3 of 4",
        "warning: data.workers = [cpu] is [bold]odd[/bold] :smile:",
        "step 3/4  loss nan (skipped)  200 tokens/s  1 GiB  0.5 s left  lr 1.00e-03",
        "saved checkpoints/step-00000003 (3 MiB in 0.25 s, training waited 10 ms)",
        "step 3: rank 1 has [other] rows",
        "profile of steps 3 to 3: profile-steps-3-3.json",
        "validation after step 3: loss 5.0000, perplexity 148.4, accuracy 50.0%",
        "Once [upon] a time\nthere",
        "save failed   3 of 4 steps",
        "loss          nan",
    ):
        assert f"{line}\n" in out


def test_a_terminal_is_left_with_a_trail_and_the_outcome(tmp_path, monkeypatch):
    stream, screen = terminal(monkeypatch)
    steps = [step(n, time=1000.0 + 0.01 * n) for n in range(1, 201)]
    run(tmp_path, [started(last_step=200), *steps, ended(steps=200)], screen)
    lines = on_screen(stream.getvalue())
    trail = [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")]
    assert trail == [1, *range(10, 201, 10)] and [line for line in lines if "━" in line] == []
    end = lines.index("finished      200 of 200 steps")
    assert lines[end - 2].startswith("step 200/200") and lines[end + 1 :][-2].startswith("run folder")


def test_a_terminal_shows_the_newest_step_below_prints_and_logs(tmp_path, monkeypatch):
    stream, screen = terminal(monkeypatch)
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("test_terminal")
    logger.addHandler(handler)
    logger.propagate = False
    sink = ConsoleSink(tmp_path, screen)
    try:
        for event in (started(last_step=200), step(1, time=1000.0), step(2, time=1001.0)):
            sink.on_event(event)
        sys.stdout.write("a print\n")
        logger.warning("a log")
        sink.on_event(WarningIssued(text="a warning"))
        sink.on_event(step(3, time=1001.01))  # too soon to be drawn
        shown = [line for line in on_screen(stream.getvalue()) if line]
        assert shown[-5:-2] == ["a print", "a log", "warning: a warning"]
        assert shown[-2].startswith("step   2/200  loss 6.5000") and set(shown[-1]) <= set("━╸╺")
    finally:
        sink.close()
        logger.removeHandler(handler)
    assert handler.stream is stream and sys.stdout is stream
    assert [line for line in on_screen(stream.getvalue()) if "━" in line] == []


def test_a_narrow_terminal_cuts_a_line_rather_than_breaking_it(tmp_path, monkeypatch):
    stream, screen = terminal(monkeypatch, width=40)
    run(tmp_path, [started(), step(1)], screen)
    assert [len(line) for line in on_screen(stream.getvalue()) if line.startswith("step")] == [40]


def test_the_time_left_follows_the_clock_of_the_attempt():
    first = step(10, time=100.0, step_time_s=0.5)
    now = [first, step(15, time=110.0), step(20, time=120.0), step(15, time=90.0)]  # last, the clock was set back
    assert [seconds_left(first, event, 20) for event in now] == [5.0, 10.0, 0.0, 0.0]


def test_lines_fit_the_facts():
    lines = start_lines(started(num_classes=None))
    assert lines[0] == "tiny: 4.21 M parameters on 2 ranks x 1 thread, a CPU"
    assert lines[1:] == ["4 steps"]
    assert checkpoint_line(started(), Path("runs/x")) == "checkpoints only at the end, in runs/x/checkpoints"
    known = {"steps_per_epoch": 1.6, "validation_targets": 12345.0, "checkpoint_every_minutes": 10.0}
    start = started(num_classes=None, **known)
    assert start_lines(start)[1:] == ["4 steps; 1.6 an epoch, so 2.5 epochs; validation on 12,345 targets"]
    assert checkpoint_line(start, Path("runs/x")) == "checkpoints every 10 minutes, in runs/x/checkpoints"
    assert step_line(step(7), 1000, 60.0).startswith("step    7/1000  loss 1.5000")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_results_and_errors_go_their_own_ways_with_their_brackets(capsys):
    stdout_console().print("[model] has [bold]no[/bold] key :smile:")
    stderr_console().print("x" * 300)
    out, err = capsys.readouterr()
    assert (out, err) == ("[model] has [bold]no[/bold] key :smile:\n", "x" * 300 + "\n")


def test_a_stream_that_is_exchanged_is_followed(capsys):
    for text in ("first", "second"):
        stdout_console().print(text)
        assert capsys.readouterr().out == f"{text}\n"


def test_json_is_printed_as_one_document(capsys):
    print_json({"long": ["y" * 200], "loss": math.nan, "pair": (1, math.inf), "[b]": -math.inf})
    document = json.loads(capsys.readouterr().out)
    assert document == {"long": ["y" * 200], "loss": "NaN", "pair": [1, "Infinity"], "[b]": "-Infinity"}


@given(PLAIN)
def test_whatever_is_printed_is_strict_json_that_float_reads_back(value):
    text = json.dumps(encode_nonfinite_floats(value), allow_nan=False)
    if isinstance(value, float):
        assert repr(float(json.loads(text))) == repr(value)


def test_importing_it_does_not_load_rich():
    code = "import sys, motet.monitor.stdout_stderr; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_start_that_fails_shows_no_folder(tmp_path, capsys):
    """It is removed where no step was completed."""
    run(tmp_path / "gone", [started(), ended(reason="failed", steps=0)])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "warning: the run ends after 0 of 4 steps"
    assert "gone" not in out
