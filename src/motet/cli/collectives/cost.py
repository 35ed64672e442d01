"""`motet collectives cost`: how long the algorithms of a collective take on a cluster, and where they cross."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motet.cli.collectives.option_limits import MAX_RANKS, integer_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motet.cluster.cluster import Cluster
    from motet.collectives.cost.size_sweep import AlgorithmCrossover, AlgorithmTimeCurve

_PLOT_POINTS, _TERMINAL_COLUMNS = 81, 64  # Of a curve in the picture, and in the terminal


@dataclass(frozen=True)
class CollectiveCostQuery:
    """What is asked."""

    collective: str
    algorithms: tuple[str, ...] | None
    cluster: Cluster
    sizes: list[int]

    @property
    def title(self) -> str:
        hosts = f", {self.cluster.hosts} hosts" if self.cluster.hosts > 1 else ""
        return f"{self.collective} of {self.cluster.ranks} ranks on {self.cluster.name}{hosts}: predicted time"


def cost(  # noqa: PLR0913 - options of a command
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="For example all-reduce.")],
    algorithms: Annotated[
        list[str] | None, typer.Argument(metavar="[ALGORITHM]...", help="Only these; else all that give equal bits.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="The name of a preset, or a TOML file.")] = "laptop",
    ranks: Annotated[
        int | None,
        typer.Option(
            callback=integer_option("--ranks", 2, MAX_RANKS),
            help="The first so many of it, with more hosts if it has fewer; else all.",
        ),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(callback=integer_option("--hosts", 1), help="A cluster of so many hosts.")
    ] = None,
    dims: Annotated[str | None, typer.Option(help="A torus of these lengths, as in 4x4x4.")] = None,
    size: Annotated[str | None, typer.Option(help="1KiB..1GiB, 64MiB or 1KiB,1MiB; 1KiB..1GiB if not given.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the plot to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the plot and the table to this page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predicted time over message size, the cheapest algorithm at each, and where they cross.

    Bandwidths are those of nccl-tests: the algorithm bandwidth is S over the time; the bus bandwidth is that times a
    factor of the collective, 2 (N-1) / N for an all-reduce, and can be compared with the speed of a link.
    """
    from motet.cli.collectives.list_algorithms import check_writable, print_lines
    from motet.collectives.cost.size_sweep import crossovers, time_curves
    from motet.monitor.console import print_json

    _check_arguments(collective, algorithms or [])
    query = CollectiveCostQuery(
        collective,
        tuple(algorithms or ()) or None,
        load_sized_cluster(cluster, ranks, hosts, dims),
        _parse_message_sizes(collective, size),
    )
    if svg or html:
        _check_plottable(query)
        check_writable(svg, html)
    predicted_curves = time_curves(collective, query.cluster, query.sizes, query.algorithms)
    crossings = crossovers(collective, query.cluster, query.sizes[0], query.sizes[-1], query.algorithms)
    _write_plots(query, predicted_curves, crossings, (svg, html))
    if json:
        print_json(_as_json(query, predicted_curves, crossings))
        return
    if query.sizes == [0]:
        print_lines(query.title, *_time_table(query, predicted_curves)[1:])
        return
    print_lines(
        query.title,
        *_time_table(query, predicted_curves),
        "",
        *_cheapest_lines(query),
        "",
        *_crossover_lines(query, crossings),
    )
    if len(query.sizes) > 1:
        print_lines("", *_plot_lines(query, crossings))
    print_lines(*(f"{path} is written" for path in (svg, html) if path))


def _check_arguments(collective: str, algorithms: list[str]) -> None:
    """What other commands take in these places."""
    from motet.cli.parse_sizes import names_program_file
    from motet.core.errors import InputError

    if names_program_file([collective]):
        raise InputError(
            f"cost takes no file such as {collective}, but a collective, as in all-reduce; what the Program of a file "
            "is predicted to take `motet collectives run FILE --cluster NAME` says"
        )
    options = [word for word in algorithms if "=" in word]
    if options:
        raise InputError(f"{options[0]!r} is an option, and cost tries the options itself; leave it out")


def _parse_message_sizes(collective: str, text: str | None) -> list[int]:
    """0 alone for a collective that carries no data."""
    from motet.cli.parse_sizes import parse_size_range
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.core.errors import InputError

    if collective not in COLLECTIVES_WITHOUT_DATA:
        return parse_size_range("1KiB..1GiB" if text is None else text)
    if text is not None:
        raise InputError(f"--size {text}, but a {collective} carries no data; leave --size out")
    return [0]


def load_sized_cluster(source: str, ranks: int | None, hosts: int | None = None, dims: str | None = None) -> Cluster:
    """A preset or file with as many ranks as are asked for, or all that it has."""
    from motet.cli.parse_sizes import parse_dims
    from motet.cluster.cluster import cluster_for_ranks
    from motet.cluster.cluster_toml import load_cluster, load_cluster_for_ranks
    from motet.cluster.topology import TorusNetwork
    from motet.core.errors import InputError

    cluster = load_cluster(source, dims=None if dims is None else parse_dims(dims))
    requested_ranks = ranks if hosts is None else hosts * cluster.devices_per_host
    if isinstance(cluster.network, TorusNetwork) and requested_ranks is not None and requested_ranks > cluster.ranks:
        lengths = "x".join(map(str, cluster.network.dims))
        option_text = f"--ranks {ranks}" if hosts is None else f"--hosts {hosts}"
        raise InputError(
            f"{option_text}: cluster {source} is one torus of {lengths} = {cluster.ranks} ranks; give --dims for more"
        )
    if hosts is not None:
        cluster = load_cluster(source, hosts=hosts, dims=None if dims is None else parse_dims(dims))
    elif ranks is not None and dims is None:
        return load_cluster_for_ranks(source, ranks)
    if ranks is None and cluster.ranks > MAX_RANKS:
        raise InputError(f"cluster {source} has {cluster.ranks} ranks; give --ranks, {MAX_RANKS} at most")
    return cluster if ranks is None else cluster_for_ranks(cluster, ranks)


def _time_table(query: CollectiveCostQuery, predicted_curves: Sequence[AlgorithmTimeCurve]) -> list[str]:
    from motet.collectives.draw.frames import align_columns

    rows = _time_rows(query, predicted_curves)
    return align_columns(rows, right_aligned=range(1, len(rows[0])))


def _time_rows(query: CollectiveCostQuery, predicted_curves: Sequence[AlgorithmTimeCurve]) -> list[list[str]]:
    """A row for each algorithm; the cheapest at each size is marked."""
    from motet.collectives.cost.cheapest_algorithm import TIE_RATIO
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.core.units import format_bytes

    best_times = [min(times) for times in zip(*(curve.seconds for curve in predicted_curves), strict=True)]
    rows = [["", *map(format_bytes, query.sizes)]]
    for curve in predicted_curves:
        pairs = zip(curve.seconds, best_times, strict=True)
        # Those that differ by no more than rounding are equals: `choose` takes one of them.
        cells = (f"{'* ' if s <= low * TIE_RATIO else ''}{format_seconds(s)}" for s, low in pairs)
        rows.append([curve.algorithm, *cells])
    return rows


def _cheapest_lines(query: CollectiveCostQuery) -> list[str]:
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.collectives.draw.frames import align_columns
    from motet.core.units import format_bytes

    rows = [["S", "cheapest", "time", "algorithm bandwidth", "bus bandwidth"]]
    for row in _cheapest_rows(query):
        speeds = (f"{row[key] / 1e9:.3g} GB/s" for key in ("algorithm_bandwidth_Bps", "bus_bandwidth_Bps"))
        rows.append([format_bytes(row["size"]), row["name"], format_seconds(row["seconds"]), *speeds])
    return align_columns(rows, right_aligned=(0, 2, 3, 4))


def _cheapest_rows(query: CollectiveCostQuery) -> list[dict[str, Any]]:
    """What `auto` picks at each size."""
    from motet.collectives.cost.alpha_beta import bus_bandwidth_factor
    from motet.collectives.cost.cheapest_algorithm import cheapest

    rows = []
    for size in query.sizes:
        best = cheapest(query.collective, size, query.cluster, query.algorithms)
        seconds = float(best.cost.seconds(size))
        speed_Bps = size / seconds if size else 0.0  # noqa: N806 - a unit
        rows.append(
            {
                "size": size,
                "algorithm": best.algorithm,
                "options": dict(best.options),
                "name": str(best),
                "seconds": seconds,
                "algorithm_bandwidth_Bps": speed_Bps,
                "bus_bandwidth_Bps": speed_Bps * float(bus_bandwidth_factor(query.collective, query.cluster.ranks)),
            }
        )
    return rows


def _crossover_lines(query: CollectiveCostQuery, crossings: Sequence[AlgorithmCrossover]) -> list[str]:
    from motet.core.units import format_bytes

    if not crossings:
        return ["no crossover: the same algorithm is the cheapest at all these sizes"] if len(query.sizes) > 1 else []
    return [f"from {format_bytes(c.size)} on {c.after} is cheaper than {c.before}" for c in crossings]


def _plot_lines(query: CollectiveCostQuery, crossings: Sequence[AlgorithmCrossover]) -> list[str]:
    from motet.collectives.cost.size_sweep import ascii_plot, log_spaced_sizes, time_curves

    sizes = log_spaced_sizes(query.sizes[0], query.sizes[-1], _TERMINAL_COLUMNS)
    return ascii_plot(time_curves(query.collective, query.cluster, sizes, query.algorithms), sizes, crossings)


def _check_plottable(query: CollectiveCostQuery) -> None:
    from motet.core.errors import InputError

    if query.sizes == [0]:
        raise InputError(f"a {query.collective} takes as long at every size; leave --svg and --html out")
    if len(query.sizes) < 2:
        raise InputError(f"a plot over the one size {query.sizes[0]} is none; give --size 1KiB..1GiB")


def _write_plots(
    query: CollectiveCostQuery,
    predicted_curves: Sequence[AlgorithmTimeCurve],
    crossings: Sequence[AlgorithmCrossover],
    paths: tuple[Path | None, Path | None],
) -> None:
    """The picture, and the page with it."""
    from motet.cli.collectives.list_algorithms import write_output_file
    from motet.collectives.cost.size_sweep import log_spaced_sizes, time_curves
    from motet.collectives.draw.cost_plot import cost_plot_html, cost_plot_svg

    if paths == (None, None):
        return
    sizes = log_spaced_sizes(query.sizes[0], query.sizes[-1], _PLOT_POINTS)
    dense_curves = time_curves(query.collective, query.cluster, sizes, query.algorithms)
    picture = cost_plot_svg(query.title, dense_curves, sizes, crossings)
    svg, html = paths
    if svg:
        write_output_file(svg, picture)
    if html:
        write_output_file(html, cost_plot_html(query.title, picture, _time_rows(query, predicted_curves)))


def _as_json(
    query: CollectiveCostQuery, predicted_curves: Sequence[AlgorithmTimeCurve], crossings: Sequence[AlgorithmCrossover]
) -> dict[str, Any]:
    return {
        "collective": query.collective,
        "cluster": query.cluster.name,
        "ranks": query.cluster.ranks,
        "sizes": query.sizes,
        "algorithms": [
            {
                "algorithm": c.algorithm,
                "seconds": c.seconds,
                "options": [dict(best.options) for best in c.best_candidates],
            }
            for c in predicted_curves
        ],
        "cheapest": _cheapest_rows(query),
        "crossovers": [{"size": c.size, "before": c.before, "after": c.after} for c in crossings],
    }
