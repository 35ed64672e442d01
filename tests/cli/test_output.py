"""Output of `motet collectives`: closed or full streams, and files that are replaced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from motet.cli.collectives.collectives_commands import collectives_app as app
from motet.cli.output import print_lines, table_lines
from motet.collectives import build
from motet.core.errors import InputError

MOTET = f"{sys.executable} -m motet collectives"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=variables)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("> /dev/full", "No space left on device; free some space, or send it elsewhere"),
        ("--json > /dev/full", "No space left on device; free some space, or send it elsewhere"),
        (">&-", "standard output is closed; send it to a file, or to /dev/null"),
    ],
)
def test_a_full_disk_or_closed_stdout_is_told_in_a_sentence(to: str, words: str) -> None:
    done = shell(f"{MOTET} list {to}")
    assert (done.returncode, done.stderr) == (5, f"motet: cannot print: {words}\n")


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full"])
def test_a_complaint_that_nobody_can_read_keeps_its_exit_code(to: str) -> None:
    done = shell(f"{MOTET} list nothing {to}")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("words", ["list", "--help", "list 2>&1"])
def test_a_reader_who_goes_away_ends_it_quietly(words: str) -> None:
    done = shell(f"{MOTET} {words} | (exec <&-; sleep 0.2); echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_what_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    text = build("all-reduce", "ring", 2).to_json().replace('"ring"', '"gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n"')
    (tmp_path / "green.json").write_text(text, encoding="utf-8")
    done = shell(f"{MOTET} draw {tmp_path}/green.json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("all-reduce/gr\\xfcn of 2 ranks")


def draw(path: Path) -> object:
    return CliRunner().invoke(app, ["draw", "all-reduce", "ring", "--svg", str(path)]).exception


def test_an_old_picture_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "ring.svg"
    picture.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("motet.core.text_files.os.fsync", full)
    failed = draw(picture)
    assert isinstance(failed, InputError) and "No space left on device; give another file" in str(failed)
    assert picture.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["ring.svg"]


@pytest.mark.parametrize("command", ["draw all-reduce ring", "cost all-reduce"])
def test_a_path_is_looked_at_before_the_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr("motet.cli.collectives.proof_report.load_or_build_program", work)
    monkeypatch.setattr("motet.collectives.cost.cheapest_algorithm.time_curves", work)
    for path in (tmp_path, tmp_path / "nowhere" / "x.svg", tmp_path / ("x" * 300)):
        failed = CliRunner().invoke(app, [*command.split(), "--html", str(path)]).exception
        assert isinstance(failed, InputError) and f"cannot write {path}: " in str(failed)


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    link, target = tmp_path / "link.svg", tmp_path / "target.svg"
    target.write_text("old")
    link.symlink_to(target)
    assert draw(link) is None and link.is_symlink() and target.read_text().startswith("<svg")
    assert draw(Path("/dev/null")) is None and Path("/dev/null").is_char_device()


def test_a_table_is_aligned_and_as_wide_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "1", Text("1 01", "red"), "long " * 30), ("b\N{CJK UNIFIED IDEOGRAPH-4E2D}", "1,234"), ()]
    print_lines(*table_lines(rows, header=("name", "[bytes]", "bits", ""), right=[1], indent=2))
    assert capsys.readouterr().out.splitlines() == [
        "  name  [bytes]  bits",
        f"  a           1  1 01  {'long ' * 30}".rstrip(),
        "  b\N{CJK UNIFIED IDEOGRAPH-4E2D}     1,234",  # A wide character takes two columns
        "",
    ]
    print_lines(*table_lines([], header=("name", "bytes")), *table_lines([("x", "y")]))
    assert capsys.readouterr().out == "name  bytes\nx  y\n"
