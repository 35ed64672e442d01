"""Measurements of the numerics monitor on the console, in the summary, and drawn by `motet show numerics`."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from example_events import ended, started, step
from rich.console import Console
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app
from motet.core.errors import InputError
from motet.monitor.console_sink import ConsoleSink
from motet.monitor.events import LostInFormat, NumericsMeasured, TensorNumerics
from motet.monitor.sinks import JsonlSink
from motet.monitor.summary import measurement_at, percent, summarize, total_of


def tensor(name: str, kind: str = "gradients", *, lowest: int = -30, zeros: int = 0) -> TensorNumerics:
    """800 values at two exponents; in float16 a quarter vanish, a quarter are subnormal and an eighth saturate."""
    losses = [{"dtype": "float32", "vanished": 0, "subnormal": 0, "saturated": 0}]
    losses.append({"dtype": "float16", "vanished": 200, "subnormal": 200, "saturated": 100})
    return TensorNumerics(
        kind=kind,
        name=name,
        elements=800 + zeros,
        zeros=zeros,
        infinite=0,
        nan=0,
        formats=tuple(LostInFormat(**loss) for loss in losses),
        lowest_exponent=lowest,
        exponents=(300, 0, 500),
    )


def measured(number: int, backward_scale: float | None = None) -> NumericsMeasured:
    tensors = tensor("a<b>.weight", zeros=200), tensor("c.weight", lowest=12), tensor("c.weight", "weights")
    return NumericsMeasured(step=number, formats=("float32", "float16"), backward_scale=backward_scale, tensors=tensors)


def test_tensors_of_a_kind_add_up() -> None:
    total = total_of("gradients", measured(1).tensors)
    assert total is not None and (total.elements, total.zeros) == (1800, 200)
    assert total.formats[1] == LostInFormat(dtype="float16", vanished=400, subnormal=400, saturated=200)
    counts = {total.lowest_exponent + i: count for i, count in enumerate(total.exponents) if count}
    assert counts == {-30: 300, -28: 500, 12: 300, 14: 500}
    assert total_of("activations", measured(1).tensors) is None


def test_a_share_is_nothing_or_everything_only_where_it_is() -> None:
    assert [percent(count, 10**6) for count in (0, 1, 5000, 999_999, 10**6)] == [
        "0%",
        "<0.1%",
        "0.5%",
        ">99.9%",
        "100%",
    ]


def test_the_console_and_the_summary_have_the_shares(tmp_path: Path) -> None:
    console = Console(record=True, width=250, file=io.StringIO())
    sink = ConsoleSink(tmp_path, console)
    for event in (started(), measured(1, 1024)):
        sink.on_event(event)
    line = console.export_text().splitlines()[-1]
    assert line == (
        "numerics of step 1 in float16 (gradients x 1024): weights 50.0% underflow, 12.5% overflow; "
        "gradients 11.1% zero, 44.4% underflow, 11.1% overflow"
    )
    summary = summarize([started(), step(1), measured(1), step(2), measured(2), ended()])
    gradients = summary.numerics["gradients"]
    assert list(summary.numerics) == ["weights", "gradients"]
    assert (gradients.zeros, gradients.underflow["float16"], gradients.overflow["float16"]) == (1 / 9, 4 / 9, 1 / 9)
    assert summarize([started(), step(1), ended()]).numerics == {}


def test_the_last_measurement_is_shown_unless_another_is_named(tmp_path: Path) -> None:
    run = [started(), measured(1), measured(2), started(first_step=2), measured(2, 8)]
    assert measurement_at(run, None, "r") == run[-1]
    assert measurement_at(run, 1, "r") == run[1]
    with pytest.raises(InputError, match="--step 3: r has measurements of steps 1, 2; give one of these"):
        measurement_at(run, 3, "r")
    with pytest.raises(InputError, match=r"r has no measurement .* monitor.numerics_every=N"):
        measurement_at([started()], None, "r")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    sink = JsonlSink(tmp_path)
    for event in (started(), measured(1), measured(2, 256)):
        sink.on_event(event)
    sink.close()
    return tmp_path


def show(*arguments: object) -> str:
    result = CliRunner().invoke(show_app, ["numerics", *map(str, arguments)], env={"COLUMNS": "200"})
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_drawn_as_text(run_folder: Path) -> None:
    lines = show(run_folder).splitlines()
    assert lines[0] == "step 2, range of float16: normal from 2^-14 to 2^16"
    assert lines[1].startswith(
        "gradients of sums of losses are multiplied by 2^8: without that, exponents would differ by -8"
    )
    (row,) = (line for line in lines if line.startswith("a<b>.weight"))
    assert row.split()[1:5] == ["20.0%", "20.0%", "20.0%", "10.0%"]
    ruler = next(line for line in lines if line.endswith("]--"))
    # One column an exponent from 2^-31 on: the values of 2^-30 stand 6 columns before those of 2^-24.
    assert ruler.index("|") - row.index("#") == 6 and ruler.index("[") - ruler.index("|") == 10
    assert row.index("@") - row.index("#") == 2
    assert "loss scale" not in show(run_folder, "--step", 1)
    assert json.loads(show(run_folder, "--json"))["tensors"][0]["exponents"] == [300, 0, 500]
    with pytest.raises(InputError, match="--dtype bfloat16: the run has counted the losses of float32 and float16"):
        show(run_folder, "--dtype", "bfloat16")


def test_it_is_drawn_as_a_picture(run_folder: Path) -> None:
    file = run_folder / "numerics.svg"
    assert "is written" in show(run_folder, "--svg", file)
    texts = [text.text or "" for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert "a<b>.weight" in texts
    assert any(text.startswith("gradients of weights") and "22.2% vanish" in text for text in texts)
    assert sum("without the loss scale" in text for text in texts) == 1
    show(run_folder, "--step", 1, "--svg", file)
    assert not re.search("without the loss scale", file.read_text())
