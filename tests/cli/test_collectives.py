"""`motet collectives`: what each command prints, its JSON, its files, and what it refuses."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from environment import uncounted
from motet.cli.collectives.collectives_commands import collectives_app as app
from motet.cluster.cluster import load_cluster
from motet.collectives.algorithms import algorithm_names, build, closed_form, find_algorithm
from motet.collectives.program import Program
from motet.core.errors import InputError
from motet.core.units import format_seconds
from program_library import ALL
from waiting import until


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "80"})


def printed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(*arguments, "--json"))
    return found


def broken(tmp_path: Path) -> Path:
    """A ring of four in which rank 1 loses a contribution in step 1."""
    made = build("all-reduce", "ring", 4)
    steps = (made.steps[0], made.steps[1][1:], *made.steps[2:])
    path = tmp_path / "broken.json"
    path.write_text(replace(made, steps=steps).to_json())
    return path


def test_list_has_every_algorithm_with_its_closed_form() -> None:
    rows = answer("list", "--ranks", "6")["algorithms"]
    assert [(row["collective"], row["algorithm"]) for row in rows] == ALL
    for row in rows:
        counted = row["at_ranks"]
        assert (counted is None) == (6 not in row["supported_ranks_2_to_64"])
        if counted:
            terms = closed_form(row["collective"], row["algorithm"], 6)
            assert (counted["alpha_coefficient"], counted["beta_coefficient"]) == (terms.alpha, float(terms.beta))


def test_list_of_one_collective_says_what_each_does() -> None:
    lines = printed("list", "all-gather").splitlines()
    assert lines[0] == "all-gather of 8 ranks"
    assert lines[1].split() == ["algorithm", "steps", "alpha", "beta", "gamma", "ranks", "options"]
    assert lines[3].split() == ["ring", "7", "7", "0.875", "0", "any"]
    assert "hierarchical" in printed("list", "all-gather") and "4, 6, 8, ..." in printed("list", "all-gather")
    assert lines[-5].startswith("ring: Every rank ")


def test_draw_prints_all_steps() -> None:
    shown = printed("draw", "broadcast", "tree", "root=2")
    assert re.findall(r"(?m)^(start|step \d+)$", shown) == ["start", "step 0", "step 1"]
    assert "copies chunk 0 to rank 0" in shown


def test_draw_writes_the_program_and_reads_it_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(printed("draw", "all-reduce", "double-tree", "pieces=2", "--ranks", "5", "--json"))
    assert Program.from_json(path.read_text()) == build("all-reduce", "double-tree", 5, pieces=2)
    assert printed("draw", str(path)) == printed("draw", "all-reduce", "double-tree", "--ranks", "5", "pieces=2")


def test_draw_writes_pictures(tmp_path: Path) -> None:
    svg, html = tmp_path / "ring.svg", tmp_path / "ring.html"
    said = printed("draw", "all-reduce", "ring", "--svg", str(svg), "--html", str(html))
    assert said.splitlines() == [f"{svg} is written", f"{html} is written"]
    assert svg.read_text().startswith("<svg") and html.read_text().startswith("<!doctype html>")


def test_prove_everything_of_a_few_ranks() -> None:
    found = answer("prove", "--all", "--ranks", "2,5,6")
    assert len({(row["collective"], row["algorithm"]) for row in found["verified"]}) >= 43
    assert {row["ranks"] for row in found["verified"]} == {2, 5, 6}
    assert {"hosts": 3} in [row["options"] for row in found["verified"]]
    assert (found["sends"], found["failed"]) == ("grouped", [])


@pytest.mark.proof
def test_prove_everything_up_to_64_ranks() -> None:
    found = answer("prove", "--all", "--ranks", "2..64")
    assert found["failed"] == [] and {row["ranks"] for row in found["verified"]} == set(range(2, 65))


def test_prove_of_one_collective_takes_the_counts_that_fit() -> None:
    lines = printed("prove", "all-reduce", "--ranks", "2..8").splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert found["all-reduce/ring"] == ["2-8", "7", "yes", "no"] and found["all-reduce/torus-3d"][:2] == ["8", "1"]
    assert found["all-reduce/flat"] == ["2-8", "7", "yes", "yes"] and "all-reduce/torus-5d" not in found


def test_prove_draws_the_step_that_is_wrong(tmp_path: Path) -> None:
    result = run("prove", str(broken(tmp_path)))
    assert isinstance(result.exception, InputError)
    assert "does not contain rank" in str(result.exception) and "at the end" in str(result.exception)
    assert re.findall(r"(?m)^(start|step \d+)$", result.stdout) == ["step 4", "step 5"]
    wrong = json.loads(run("prove", str(broken(tmp_path)), "--json").stdout)["failed"]
    assert [(row["ranks"], row["step"]) for row in wrong] == [(4, None)]
    assert wrong[0]["message"] == str(result.exception)


def test_prove_of_a_collective_with_options_takes_the_algorithms_that_have_them() -> None:
    rows = answer("prove", "all-reduce", "root=1", "--ranks", "4")["verified"]
    algorithms = [find_algorithm("all-reduce", name) for name in algorithm_names("all-reduce")]
    assert {row["algorithm"] for row in rows} == {each.name for each in algorithms if "root" in each.options}
    assert all(row["options"] == {"root": 1} for row in rows)


@pytest.mark.parametrize(("name", "near"), [("all_reduce", " (nearest: all-reduce)"), ("of-mine", "")])
def test_prove_says_that_a_name_promises_nothing(name: str, near: str, tmp_path: Path) -> None:
    (tmp_path / "near.json").write_text(replace(build("all-reduce", "ring", 2), collective=name).to_json())
    remark = f"{name} is not a known collective{near}: its `final` is proven, but not held to a name"
    assert printed("prove", str(tmp_path / "near.json")).splitlines()[-1] == remark
    assert answer("prove", str(tmp_path / "near.json"))["remarks"] == [remark]
    assert answer("prove", "all-reduce", "ring", "--ranks", "2")["remarks"] == []


def test_prove_with_blocking_sends() -> None:
    (proven,) = answer("prove", "broadcast", "tree", "--ranks", "9", "--sends", "blocking")["verified"]
    assert proven["supports_blocking_sends"]
    result = run("prove", "all-reduce", "ring", "--ranks", "4", "--sends", "blocking")
    assert "ranks 0 -> 1 -> 2 -> 3 -> 0 wait in a circle" in str(result.exception) and "step 0" in result.stdout


DGX = ("--cluster", "dgx-h100", "--ranks", "16")


def test_cost_compares_algorithms_over_sizes() -> None:
    found = answer("cost", "all-reduce", *DGX)
    assert found["sizes"] == [1024 * 4**n for n in range(11)]
    for n, best in enumerate(found["cheapest"]):
        times = {row["algorithm"]: row["seconds"][n] for row in found["algorithms"]}
        assert best["seconds"] == pytest.approx(min(times.values()), rel=1e-8)
        assert times[best["algorithm"]] == pytest.approx(best["seconds"])
        assert best["algorithm_bandwidth_Bps"] == pytest.approx(best["size"] / best["seconds"])
        assert best["bus_bandwidth_Bps"] == pytest.approx(best["algorithm_bandwidth_Bps"] * 2 * 15 / 16)
    assert "naive" not in times  # ranks would differ
    changes = [a["algorithm"] != b["algorithm"] for a, b in zip(found["cheapest"], found["cheapest"][1:], strict=False)]
    assert len(found["crossovers"]) >= sum(changes) > 0


def test_cost_prints_table_crossovers_and_plot() -> None:
    shown = printed("cost", "all-reduce", "recursive-doubling", "hierarchical-sharded", *DGX)
    lines = shown.splitlines()
    assert lines[0] == "all-reduce of 16 ranks on dgx-h100, 2 hosts: predicted time"
    starred = [line.count("* ") for line in lines[2:4]]
    assert sum(starred) >= 11 and min(starred) > 0
    (crossed,) = re.findall(r"from (.*) on hierarchical-sharded is cheaper than recursive-doubling", shown)
    assert crossed.endswith("iB")
    assert "^" in shown and lines[-1].split() == ["a", "recursive-doubling", "b", "hierarchical-sharded"]


@pytest.mark.parametrize(("collective", "messages"), [("barrier", 3), ("signal", 1)])
def test_cost_of_what_carries_no_data_is_one_time(collective: str, messages: int) -> None:
    title, line = printed("cost", collective, "--cluster", "laptop").splitlines()
    assert title == f"{collective} of 8 ranks on laptop: predicted time"
    start_up_s = load_cluster("laptop").link("0.out").alpha_s.value
    assert line.split()[1:] == ["*", *format_seconds(messages * start_up_s).split()]
    found = answer("cost", collective, "--cluster", "laptop")
    assert (found["sizes"], found["cheapest"][0]["bus_bandwidth_Bps"]) == ([0], 0)


def test_cost_of_one_size_has_no_plot_and_marks_all_that_are_the_cheapest_but_for_rounding() -> None:
    shown = printed("cost", "all-reduce", "naive", "--ranks", "4", "--size", "64MiB")
    assert "* " in shown and "crossover" not in shown and "^" not in shown
    shown = printed("cost", "all-reduce", "direct", "ring", "--size", "64MiB", "--cluster", "laptop")
    rows = {line.split()[0]: line for line in shown.splitlines()[2:4]}
    assert "* " in rows["direct"] and "* " in rows["ring"]


def test_cost_writes_the_plot(tmp_path: Path) -> None:
    svg, html = tmp_path / "cost.svg", tmp_path / "cost.html"
    printed("cost", "all-gather", "--ranks", "8", "--svg", str(svg), "--html", str(html))
    assert svg.read_text() in html.read_text() and "all-gather of 8 ranks on laptop" in svg.read_text()


def test_run_checks_counts_and_times() -> None:
    command = "run all-reduce ring --ranks 2 --size 4KiB --repeats 3 --cluster laptop"
    found = answer(*command.split())
    assert (found["ranks"], found["size"], found["repeats"], found["dtype"]) == (2, 4096, 3, "float32")
    assert 0 < found["seconds"]["min"] <= found["seconds"]["median"] <= found["seconds"]["max"]
    assert 0 < found["largest_error"] <= found["allowed_error"] < 1e-5
    each = {"bytes": 4096, "messages": 2, "program_bytes": 4096, "program_messages": 2}
    assert found["sent"] == [each, each] and found["predicted_seconds"] > 0


def test_run_ends_with_ctrl_c() -> None:
    words = ("run", "all-reduce", "ring", "--ranks", "2", "--size", "16MiB", "--repeats", "10000")
    command = [sys.executable, "-m", "motet", "collectives", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=uncounted()) as process:
        until(lambda: len(psutil.Process(process.pid).children()) == 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [pytest.param("barrier", "dissemination", marks=pytest.mark.proof), ("signal", "direct")],
)
def test_run_of_what_carries_no_data_prints_a_time_alone(collective: str, algorithm: str) -> None:
    shown = printed("run", collective, algorithm, "--repeats", "2").splitlines()
    assert shown[:2] == [f"{collective}/{algorithm} of 2 ranks", "right: every token has arrived"]
    assert re.fullmatch(r"time: .*, the median of 2 \(.* to .*\)", shown[2]) and "GB/s" not in "".join(shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("list allreduce", "there is no collective 'allreduce'"),
        ("draw all-reduce", "which algorithm of all-reduce? There are flat, naive"),
        ("draw all-reduce rings", "(nearest: ring)"),
        ("draw all-reduce ring tree", "'tree' is one word too many"),
        ("draw all-reduce ring pieces=3", "it has no options"),
        ("draw broadcast tree root=x", "root: 'x' is not a whole number"),
        ("draw broadcast tree root=9", "root 9: give 0 to 3, one of the 4 ranks"),
        ("draw all-reduce torus-2d dims=3x2", "dims 3x2 are not a grid of 4 ranks"),
        ("draw all-reduce torus-2d dims=2,2", "dims: '2,2' is not a whole number; write it as in dims=4x4"),
        ("draw all-reduce ring --ranks 2000", "ranks 2000: give 2 to 1024"),
        ("draw all-reduce ring --ranks 17 --svg x.svg", "a picture has at most 16 ranks"),
        ("draw all-reduce ring --svg nowhere/x.svg", "cannot write nowhere/x.svg"),
        ("draw nowhere.json", "cannot read nowhere.json: No such file or directory"),
        ("prove", "what is to be proven?"),
        ("prove all-reduce --all", "--all and 'all-reduce'"),
        ("prove all-reduce torus-3d --ranks 7", "torus-3d takes 8, 12, 16"),
        ("prove all-reduce ring --ranks 1", "ranks 1: give 2 to 1024"),
        ("prove all-reduce ring --ranks 8..4", "the smaller number first"),
        ("prove all-reduce ring --ranks many", "ranks: 'many' is not a whole number"),
        ("cost all-reduce --cluster dgx", "no cluster 'dgx'"),
        ("cost all-reduce --ranks 9", "cluster laptop has 8 ranks, not 9"),
        ("cost all-reduce --size 64XB", "size '64XB' is not a number of bytes"),
        ("cost all-reduce --size 0", "size '0' is 0 bytes; give 1 to 2^60"),
        ("cost all-reduce --size 1MiB..1KiB", "the second is not larger"),
        ("cost barrier --size 1MiB", "--size 1MiB, but a barrier carries no data; leave --size out"),
        ("cost signal --svg x.svg", "a signal takes as long at every size; leave --svg and --html out"),
        ("cost all-reduce --size 1MiB --svg x.svg", "--size gives the one size 1048576 for a plot"),
        ("draw all-reduce double-tree pieces=999999999", "give 1 to 65536 with 4 ranks"),
        ("run all-reduce ring --size 8GiB", "S of 8 GiB is more than the 4 GiB that ranks of one machine execute"),
        ("run all-reduce ring --cluster dgx", "no cluster 'dgx'"),
        ("run all-reduce ring --ranks 33", "this machine executes Programs of 2 to 32 ranks"),
    ],
)
def test_bad_input_is_told_in_a_sentence(arguments: str, words: str) -> None:
    result = run(*arguments.split())
    assert isinstance(result.exception, InputError) and result.exception.exit_code == 2, result.output
    assert words in str(result.exception)


def test_a_file_of_another_count_or_with_a_wrong_program_is_refused(tmp_path: Path) -> None:
    file = str(broken(tmp_path))
    assert "is a Program of 4 ranks" in str(run("draw", file, "--ranks", "5").exception)
    assert "is a file, which says its ranks" in str(run("prove", file, "--ranks", "4").exception)
    assert "does not contain rank" in str(run("run", file).exception)


@pytest.mark.parametrize(
    "arguments", ["list", "draw all-reduce ring", "prove all-reduce ring --ranks 4", "cost all-reduce --ranks 4"]
)
def test_no_torch_is_loaded(arguments: str) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom motet.cli.main import app\n"
        f"assert CliRunner().invoke(app, {['collectives', *arguments.split()]!r}).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
