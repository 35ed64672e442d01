"""The commands `motet collectives list | draw | prove | cost | validate | run`.

The output of `motet collectives validate`: predicted and published times of vendor libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option, Typer

from motet.cli.job_arguments import MAX_RANKS, CommandGroup, Json, JsonAndProgress, integer_option
from motet.cli.output import check_writable, print_lines, write_output_file
from motet.collectives.cost import published_curves
from motet.collectives.draw.cost_plot import curve_panels_svg
from motet.monitor.stdout_stderr import print_json


def print_errors_of_curves(path: Path, *, by: str, svg: Path | None, json: bool) -> None:
    """Print the errors of all curves of a file, and draw those of quality A."""
    check_writable(svg)
    curves = published_curves.read_published_curves(path)
    report = published_curves.curve_report(curves)
    if svg:
        shown = [time for time in curves.times if time.quality == "A"] or curves.times
        write_output_file(svg, curve_panels_svg(shown, "Published and predicted times of NCCL and RCCL"))
    if json:
        print_json(report)
        return
    print_lines(*_lines(report, published_curves.errors_by(curves, by), by))


def _lines(report: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]], by: str) -> Iterator[str]:
    sizes = (("large", "from 16 MiB"), ("middle", "1 to 16 MiB"), ("small", "below 1 MiB"))
    has_best = any(curve["quality"] == "A" for curve in report["curves"])
    rows = "quality A" if has_best else "no row of quality A, so all rows"
    yield f"{rows}: median error {report['median']:.1%}, p90 {report['p90']:.1%}"
    for name, text in sizes:
        yield f"  {text}:{_errors(report[name])}"
    peaks = report["peaks"]
    if peaks["curves"]:
        yield f"  peak bus bandwidth within 8 % on {peaks['within_8_percent']} of {peaks['curves']} curves"
    yield f"  by {by}:"
    yield from (f"    {name[:80]}:{_errors(errors)}" for name, errors in groups.items())
    yield f"all qualities:{_errors(report['all_qualities'])}"
    yield from (f"skipped {rows} rows: {reason}" for reason, rows in report["skipped"].items())
    yield "curves, with measured and predicted peaks of bus bandwidth in GB/s:"
    for curve in report["curves"]:
        peak = f"{curve['measured_peak_Bps'] / 1e9:.0f} / {curve['predicted_peak_Bps'] / 1e9:.0f}"
        facts = f"{curve['collective']} of {curve['ranks']} {curve['gpu']}, {curve['network']}"
        yield f"  {curve['id']} ({facts}, quality {curve['quality']}):{_errors(curve)}, peak {peak}"


def _errors(errors: Mapping[str, Any]) -> str:
    if not errors["rows"]:
        return " no rows"
    return f" {errors['rows']} rows, median error {errors['median']:.1%}, p90 {errors['p90']:.1%}"


collectives_app = Typer(
    cls=CommandGroup, no_args_is_help=True, help="Collectives: list, draw, prove, cost, validate and run them."
)

_RANKS = integer_option("--ranks", 2, MAX_RANKS)
ProgramWords = Annotated[
    list[str], Argument(metavar="COLLECTIVE ALGORITHM [NAME=VALUE]... or FILE.json", help="The Program.")
]


@collectives_app.command("list")
def list_command(
    *,
    collective: Annotated[str | None, Argument(metavar="[COLLECTIVE]", help="Only this collective; else all.")] = None,
    ranks: Annotated[int, Option(callback=_RANKS, help="Count rounds and traffic for these.")] = 8,
    json: Json = False,
) -> None:
    """The algorithms of each collective, the ranks and options that they support, and their closed forms.

    Times are of a network where every rank has one full-duplex port: `alpha` start-ups, plus `beta` times S bytes
    over the bandwidth, plus `gamma` times S bytes in the adder.
    """
    from motet.cli.collectives.proof_report import list_algorithms_of

    list_algorithms_of(collective, ranks, json)


@collectives_app.command("draw")
def draw_command(
    *,
    words: ProgramWords,
    ranks: Annotated[int | None, Option(callback=_RANKS, help="Ranks of the Program; 4 when not given.")] = None,
    svg: Annotated[Path | None, Option(help="Write a picture of all steps to this file.")] = None,
    animation: Annotated[Path | None, Option(help="Write an SVG that plays the steps to this file.")] = None,
    html: Annotated[Path | None, Option(help="Write an animated page to this file.")] = None,
    json: Annotated[bool, Option("--json", help="Print the Program as JSON: docs/reference/program.md.")] = False,
) -> None:
    """Draw the transfers of each step, and the chunks that each rank then holds."""
    from motet.cli.collectives.proof_report import draw_program

    draw_program(words, ranks, svg=svg, animation=animation, html=html, json=json)


@collectives_app.command("prove")
def prove_command(
    *,
    words: Annotated[
        list[str] | None,
        Argument(metavar="[COLLECTIVE [ALGORITHM] [NAME=VALUE]... or FILE.json]", help="The Programs to prove."),
    ] = None,
    everything: Annotated[
        bool, Option("--all", help="All algorithms, with the hosts and dimensions that they may have.")
    ] = False,
    ranks: Annotated[str | None, Option(help="Numbers of ranks: 2..64, 4,8 or 7; 2..16 if not given.")] = None,
    sends: Annotated[
        Literal["grouped", "blocking"],
        Option(help="A rank sends and receives simultaneously, or each send waits for its receiver."),
    ] = "grouped",
    json: JsonAndProgress = False,
) -> None:
    """Prove that Programs compute their collective for every input; draw the step where one does not."""
    from motet.cli.collectives.proof_report import prove_programs

    prove_programs(words or [], ranks, sends, everything=everything, json=json)


@collectives_app.command("cost")
def cost_command(  # noqa: PLR0913 - options of a command
    *,
    collective: Annotated[str, Argument(metavar="COLLECTIVE", help="For example all-reduce.")],
    algorithms: Annotated[
        list[str] | None, Argument(metavar="[ALGORITHM]...", help="Only these; else all that give equal bits.")
    ] = None,
    cluster: Annotated[str, Option(help="The name of a preset, or a TOML file.")] = "laptop",
    ranks: Annotated[
        int | None, Option(callback=_RANKS, help="The first N ranks of it, with more hosts if it has fewer; else all.")
    ] = None,
    hosts: Annotated[int | None, Option(callback=integer_option("--hosts", 1), help="A cluster of N hosts.")] = None,
    dims: Annotated[str | None, Option(help="A torus of these lengths, as in 4x4x4.")] = None,
    size: Annotated[str | None, Option(help="1KiB..1GiB, 64MiB or 1KiB,1MiB; 1KiB..1GiB if not given.")] = None,
    execution: Annotated[
        Literal["steps", "pipelined", "library"],
        Option(help="Step after step, as motet does; with pieces in flight; or the algorithms of NCCL and RCCL."),
    ] = "steps",
    svg: Annotated[Path | None, Option(help="Write the plot to this file.")] = None,
    html: Annotated[Path | None, Option(help="Write the plot and the table to this page.")] = None,
    json: Json = False,
) -> None:
    """Predicted time over message size, the cheapest algorithm at each, and where they cross.

    Bandwidths are those of nccl-tests: the algorithm bandwidth is S over the time; the bus bandwidth is that times a
    factor of the collective, 2 (N-1) / N for an all-reduce, and can be compared with the speed of a link.
    """
    from motet.cli.collectives.cost_report import cost_query, load_sized_cluster, report_cost

    sized_cluster = load_sized_cluster(cluster, ranks, hosts=hosts, dims=dims)
    query = cost_query(collective, algorithms or [], sized_cluster, size=size, execution=execution)
    report_cost(query, svg, html, json=json)


@collectives_app.command("validate")
def validate_command(
    *,
    path: Annotated[Path, Argument(metavar="FILE.csv", help="Published times of nccl-tests, with a header.")],
    by: Annotated[
        Literal["collective", "gpu", "network", "source"],
        Option(help="The property of rows that errors are printed for."),
    ] = "collective",
    svg: Annotated[Path | None, Option(help="Draw the curves of quality A to this file.")] = None,
    json: Json = False,
) -> None:
    """Predict published times of vendor libraries, and print how far the predictions are from them.

    The errors are those of rows of quality A, each of which is predicted, or the command fails.
    """

    print_errors_of_curves(path, by=by, svg=svg, json=json)


@collectives_app.command("run")
def run_command(
    *,
    words: ProgramWords,
    ranks: Annotated[
        int | None, Option(callback=integer_option("--ranks", 2), help="Ranks on this machine; 2 when not given.")
    ] = None,
    size: Annotated[str | None, Option(help="S, for example 4KiB or 16MiB; 1MiB if not given.")] = None,
    repeats: Annotated[int, Option(callback=integer_option("--repeats", 1, 10_000), help="Measurements to take.")] = 5,
    cluster: Annotated[str | None, Option(help="A preset or TOML file, to predict the time on.")] = None,
    backend: Annotated[
        Literal["auto", "motet", "gloo"], Option(help="The transport of messages; auto is motet on Linux x86-64.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Execute a Program on CPU ranks by messages: check the sums, count the sent bytes, and measure the time."""
    from motet.cli.collectives.run_on_ranks import run_program

    run_program(words, ranks, size, repeats=repeats, cluster=cluster, backend=backend, json=json)
