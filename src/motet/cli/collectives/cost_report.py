"""The output of `motet collectives cost`: predicted times of the algorithms on a cluster, and their crossovers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from motet.cli.collectives.proof_report import names_program_file
from motet.cli.job_arguments import MAX_RANKS, parse_dims, parse_size_range
from motet.cli.output import OutputLine, check_writable, print_lines, table_lines, write_output_file
from motet.cluster.cluster import Cluster, TorusNetwork, load_cluster, load_cluster_for_ranks
from motet.collectives.cost import cheapest_algorithm as costs
from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA, bus_bandwidth_factor
from motet.collectives.draw.cost_plot import ascii_plot, cost_plot_html, cost_plot_svg
from motet.core.errors import InputError, check_input
from motet.core.units import format_bytes, format_seconds
from motet.monitor.stdout_stderr import print_json

_TITLES = {"steps": "", "pipelined": ", pipelined", "library": ", NCCL or RCCL"}
_PLOT_POINTS, _TERMINAL_COLUMNS = 81, 64


@dataclass(frozen=True)
class CollectiveCostQuery:
    """A collective on a cluster, at some sizes; a collective without data has the one size 0."""

    collective: str
    algorithms: tuple[str, ...] | None
    cluster: Cluster
    sizes: list[int]
    execution: costs.Execution = "steps"

    @property
    def title(self) -> str:
        """The title of the table and of the plot."""
        hosts = f", {self.cluster.hosts} hosts" if self.cluster.hosts > 1 else ""
        ranks = f"{self.cluster.ranks} ranks on {self.cluster.name}{hosts}"
        return f"{self.collective} of {ranks}: predicted time{_TITLES[self.execution]}"

    def curves_at(self, sizes: Sequence[float]) -> Sequence[costs.AlgorithmTimeCurve]:
        """A curve of predicted times for each algorithm."""
        return costs.time_curves(self.collective, self.cluster, sizes, self.algorithms, execution=self.execution)

    @cached_property
    def crossovers(self) -> Sequence[costs.AlgorithmCrossover]:
        """Sizes from which on another algorithm is the cheapest."""
        ends = self.sizes[0], self.sizes[-1]
        return costs.crossovers(self.collective, self.cluster, *ends, self.algorithms, execution=self.execution)


def cost_query(
    collective: str,
    algorithms: list[str],
    cluster: Cluster,
    *,
    size: str | None,
    execution: costs.Execution = "steps",
) -> CollectiveCostQuery:
    """Check the words of the command line."""
    check_input(
        not names_program_file([collective]),
        f"cost takes no file such as {collective}, but a collective, as in all-reduce; `motet collectives run FILE "
        "--cluster NAME` predicts the time of the Program in a file",
    )
    if options := [word for word in algorithms if "=" in word]:
        raise InputError(f"{options[0]!r} is an option, and cost tries the options itself; leave it out")
    sizes = parse_size_range("1KiB..1GiB" if size is None else size) if check_carries_data(collective, size) else [0]
    return CollectiveCostQuery(collective, tuple(algorithms) or None, cluster, sizes, execution)


def check_carries_data(collective: str, size: str | None) -> bool:
    """Whether a collective carries data; raise if `--size` is set for one that does not."""
    has_data = collective not in COLLECTIVES_WITHOUT_DATA
    check_input(has_data or size is None, f"--size {size}, but a {collective} carries no data; leave --size out")
    return has_data


def load_sized_cluster(source: str, ranks: int | None, *, hosts: int | None = None, dims: str | None = None) -> Cluster:
    """Load a preset or file, with as many ranks as are requested, or all that it has."""
    lengths = None if dims is None else parse_dims(dims)
    cluster = load_cluster(source, dims=lengths)
    requested_ranks = ranks if hosts is None else hosts * cluster.devices_per_host
    if isinstance(cluster.network, TorusNetwork) and requested_ranks is not None and requested_ranks > cluster.ranks:
        option = f"--ranks {ranks}" if hosts is None else f"--hosts {hosts}"
        size = f"{'x'.join(map(str, cluster.network.dims))} = {cluster.ranks} ranks"
        raise InputError(f"{option}: cluster {source} is one torus of {size}; give --dims for more")
    if hosts is not None:
        cluster = load_cluster(source, hosts=hosts, dims=lengths)
    elif ranks is not None and dims is None:
        return load_cluster_for_ranks(source, ranks)
    if ranks is None and cluster.ranks > MAX_RANKS:
        raise InputError(f"cluster {source} has {cluster.ranks} ranks; give --ranks, {MAX_RANKS} at most")
    return cluster if ranks is None else replace(cluster, ranks=ranks)


def report_cost(query: CollectiveCostQuery, svg: Path | None, html: Path | None, *, json: bool) -> None:
    """Print times, cheapest algorithms and crossovers, and write the plots."""
    if svg or html:
        check_input(query.sizes != [0], f"a {query.collective} takes as long at every size; leave --svg and --html out")
        check_input(len(query.sizes) > 1, f"--size gives the one size {query.sizes[0]} for a plot; give 1KiB..1GiB")
        check_writable(svg, html)
    curves = query.curves_at(query.sizes)
    time_rows = _time_rows(query, curves)
    if svg or html:
        sizes = costs.log_spaced_sizes(query.sizes[0], query.sizes[-1], _PLOT_POINTS)
        picture = cost_plot_svg(query.title, query.curves_at(sizes), sizes, query.crossovers)
        for path, text in ((svg, picture), (html, cost_plot_html(query.title, picture, time_rows))):
            if path:
                write_output_file(path, text)
    if json:
        print_json(_as_json(query, curves))
        return
    header, rows = ([], time_rows[1:]) if query.sizes == [0] else (time_rows[0], time_rows[1:])
    times = table_lines(rows, header=header, right=range(1, len(time_rows[0])), indent=2)
    if query.sizes == [0]:
        print_lines(query.title, *times)
        return
    print_lines(query.title, *times, "", *_cheapest_lines(query), "", *_crossover_lines(query))
    if len(query.sizes) > 1:
        sizes = costs.log_spaced_sizes(query.sizes[0], query.sizes[-1], _TERMINAL_COLUMNS)
        print_lines("", *ascii_plot(query.curves_at(sizes), sizes, query.crossovers))
    print_lines(*(f"{path} is written" for path in (svg, html) if path))


def _time_rows(query: CollectiveCostQuery, curves: Sequence[costs.AlgorithmTimeCurve]) -> list[list[str]]:
    """A row for each algorithm; a star marks the cheapest at each size, and those within rounding of it."""
    best_times = [min(times) for times in zip(*(curve.seconds for curve in curves), strict=True)]
    rows = [["", *map(format_bytes, query.sizes)]]
    for curve in curves:
        pairs = zip(curve.seconds, best_times, strict=True)
        cells = (f"{'* ' if s <= low * costs.TIE_RATIO else ''}{format_seconds(s)}" for s, low in pairs)
        rows.append([curve.algorithm, *cells])
    return rows


def _cheapest_rows(query: CollectiveCostQuery) -> list[dict[str, Any]]:
    rows = []
    for size in query.sizes:
        facts = query.collective, size, query.cluster, query.algorithms
        best = costs.cheapest(*facts, execution=query.execution)
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


def _cheapest_lines(query: CollectiveCostQuery) -> Iterator[OutputLine]:
    header, rows = ["S", "cheapest", "time", "algorithm bandwidth", "bus bandwidth"], []
    for row in _cheapest_rows(query):
        speeds = (f"{row[key] / 1e9:.3g} GB/s" for key in ("algorithm_bandwidth_Bps", "bus_bandwidth_Bps"))
        rows.append([format_bytes(row["size"]), row["name"], format_seconds(row["seconds"]), *speeds])
    return table_lines(rows, header=header, right=(0, 2, 3, 4), indent=2)


def _crossover_lines(query: CollectiveCostQuery) -> list[str]:
    lines = [f"from {format_bytes(c.size)} on {c.after} is cheaper than {c.before}" for c in query.crossovers]
    nothing = ["no crossover: the same algorithm is the cheapest at all these sizes"] if len(query.sizes) > 1 else []
    return lines or nothing


def _as_json(query: CollectiveCostQuery, curves: Sequence[costs.AlgorithmTimeCurve]) -> dict[str, Any]:
    return {
        "collective": query.collective,
        "cluster": query.cluster.name,
        "ranks": query.cluster.ranks,
        "execution": query.execution,
        "sizes": query.sizes,
        "algorithms": [
            {"algorithm": c.algorithm, "seconds": c.seconds, "options": [dict(b.options) for b in c.best_candidates]}
            for c in curves
        ],
        "cheapest": _cheapest_rows(query),
        "crossovers": [{"size": c.size, "before": c.before, "after": c.after} for c in query.crossovers],
    }
