"""Plots of benchmarks: matplotlib draws the same file again, and a benchmark goes on without it."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from parts.report.plots import Axis, Line, Row, save_dot_plot, save_line_plot

LINES = [Line("falling", [(1, 3.0), (2, 2.0)], 0), Line("dashed", [(1, 1.0), (2, 1.5)], 9, dashed=True)]


def draw(path: Path) -> None:
    save_line_plot(path, LINES, title="a < b", note="a note", x=Axis("step", ticks=(1, 2)), y=Axis("loss", True))


def test_a_benchmark_without_matplotlib_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw(tmp_path / "a.svg")
    sentence = "a.svg is not drawn, since matplotlib is not installed; run: pip install 'motet[docs]'\n"
    assert capsys.readouterr().out == sentence and not (tmp_path / "a.svg").exists()


@pytest.mark.proof
def test_the_same_values_are_the_same_file_with_all_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib belongs to the docs extra")
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert all(word in text for word in ("a < b", "a note", "falling", "dashed", "step", "loss"))
    rows = [Row("first", [1.0, 2.0], 0), Row("second", [-1.0], 3)]
    save_dot_plot(tmp_path / "c.svg", rows, title="dots", note="", label="difference")
    text = "".join(ElementTree.parse(tmp_path / "c.svg").getroot().itertext())
    assert all(word in text for word in ("dots", "first", "second", "difference"))
