"""`motet collectives cost`: how long the algorithms of a collective take on a cluster, and where they cross."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motet.cli.collectives_limits import MOST_RANKS, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from motet.cluster.cluster import Cluster
    from motet.collectives.cost.size_sweep import AlgorithmCrossover, AlgorithmTimeCurve

_POINTS, _COLUMNS = 81, 64
"""Of a curve in the picture, and in the terminal."""


@dataclass(frozen=True)
class Question:
    """What is asked."""

    collective: str
    names: tuple[str, ...] | None
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
            callback=whole("--ranks", 2, MOST_RANKS),
            help="The first so many of it, with more hosts if it has fewer; else all.",
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(callback=whole("--hosts", 1), help="A cluster of so many hosts.")] = None,
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
    from motet.cli.collectives import check_writable, say
    from motet.collectives.cost.size_sweep import crossovers, time_curves
    from motet.monitor.console import print_json

    _refuse_words(collective, algorithms or [])
    asked = Question(
        collective,
        tuple(algorithms or ()) or None,
        sized_cluster(cluster, ranks, hosts, dims),
        _sizes(collective, size),
    )
    if svg or html:
        _refuse_plot(asked)
        check_writable(svg, html)
    found = time_curves(collective, asked.cluster, asked.sizes, asked.names)
    crossed = crossovers(collective, asked.cluster, asked.sizes[0], asked.sizes[-1], asked.names)
    _write(asked, found, crossed, (svg, html))
    if json:
        print_json(_record(asked, found, crossed))
        return
    if asked.sizes == [0]:
        say(asked.title, *_table(asked, found)[1:])
        return
    say(asked.title, *_table(asked, found), "", *_winners(asked), "", *_told(asked, crossed))
    if len(asked.sizes) > 1:
        say("", *_plotted(asked, crossed))
    say(*(f"{path} is written" for path in (svg, html) if path))


def _refuse_words(collective: str, algorithms: list[str]) -> None:
    """What other commands take in these places."""
    from motet.cli.amounts import is_file
    from motet.core.errors import InputError

    if is_file([collective]):
        raise InputError(
            f"cost takes no file such as {collective}, but a collective, as in all-reduce; what the Program of a file "
            "is predicted to take `motet collectives run FILE --cluster NAME` says"
        )
    options = [word for word in algorithms if "=" in word]
    if options:
        raise InputError(f"{options[0]!r} is an option, and cost tries the options itself; leave it out")


def _sizes(collective: str, text: str | None) -> list[int]:
    """0 alone for a collective that carries no data."""
    from motet.cli.amounts import parse_sizes
    from motet.collectives.cost.alpha_beta import COLLECTIVES_WITHOUT_DATA
    from motet.core.errors import InputError

    if collective not in COLLECTIVES_WITHOUT_DATA:
        return parse_sizes("1KiB..1GiB" if text is None else text)
    if text is not None:
        raise InputError(f"--size {text}, but a {collective} carries no data; leave --size out")
    return [0]


def sized_cluster(source: str, ranks: int | None, hosts: int | None = None, dims: str | None = None) -> Cluster:
    """A preset or file with as many ranks as are asked for, or all that it has."""
    from motet.cli.amounts import parse_dims
    from motet.cluster.cluster import cluster_for_ranks
    from motet.cluster.cluster_toml import load_cluster, load_cluster_for_ranks
    from motet.cluster.topology import TorusNetwork
    from motet.core.errors import InputError

    found = load_cluster(source, dims=None if dims is None else parse_dims(dims))
    wanted = ranks if hosts is None else hosts * found.devices_per_host
    if isinstance(found.network, TorusNetwork) and wanted is not None and wanted > found.ranks:
        lengths = "x".join(map(str, found.network.dims))
        asked = f"--ranks {ranks}" if hosts is None else f"--hosts {hosts}"
        raise InputError(
            f"{asked}: cluster {source} is one torus of {lengths} = {found.ranks} ranks; give --dims for more"
        )
    if hosts is not None:
        found = load_cluster(source, hosts=hosts, dims=None if dims is None else parse_dims(dims))
    elif ranks is not None and dims is None:
        return load_cluster_for_ranks(source, ranks)
    if ranks is None and found.ranks > MOST_RANKS:
        raise InputError(f"cluster {source} has {found.ranks} ranks; give --ranks, {MOST_RANKS} at most")
    return found if ranks is None else cluster_for_ranks(found, ranks)


def _table(asked: Question, found: Sequence[AlgorithmTimeCurve]) -> list[str]:
    from motet.collectives.draw.frames import align_columns

    rows = _rows(asked, found)
    return align_columns(rows, right_aligned=range(1, len(rows[0])))


def _rows(asked: Question, found: Sequence[AlgorithmTimeCurve]) -> list[list[str]]:
    """A row for each algorithm; the cheapest at each size is marked."""
    from motet.collectives.cost.cheapest_algorithm import TIE_RATIO
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.core.units import format_bytes

    least = [min(times) for times in zip(*(curve.seconds for curve in found), strict=True)]
    rows = [["", *map(format_bytes, asked.sizes)]]
    for curve in found:
        pairs = zip(curve.seconds, least, strict=True)
        # Those that differ by no more than rounding are equals: `choose` takes one of them.
        cells = (f"{'* ' if s <= low * TIE_RATIO else ''}{format_seconds(s)}" for s, low in pairs)
        rows.append([curve.algorithm, *cells])
    return rows


def _winners(asked: Question) -> list[str]:
    from motet.collectives.cost.size_sweep import format_seconds
    from motet.collectives.draw.frames import align_columns
    from motet.core.units import format_bytes

    rows = [["S", "cheapest", "time", "algorithm bandwidth", "bus bandwidth"]]
    for row in _cheapest(asked):
        speeds = (f"{row[key] / 1e9:.3g} GB/s" for key in ("algorithm_bandwidth_Bps", "bus_bandwidth_Bps"))
        rows.append([format_bytes(row["size"]), row["name"], format_seconds(row["seconds"]), *speeds])
    return align_columns(rows, right_aligned=(0, 2, 3, 4))


def _cheapest(asked: Question) -> list[dict[str, Any]]:
    """What `auto` picks at each size."""
    from motet.collectives.cost.alpha_beta import bus_bandwidth_factor
    from motet.collectives.cost.cheapest_algorithm import cheapest

    rows = []
    for size in asked.sizes:
        best = cheapest(asked.collective, size, asked.cluster, asked.names)
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
                "bus_bandwidth_Bps": speed_Bps * float(bus_bandwidth_factor(asked.collective, asked.cluster.ranks)),
            }
        )
    return rows


def _told(asked: Question, crossed: Sequence[AlgorithmCrossover]) -> list[str]:
    from motet.core.units import format_bytes

    if not crossed:
        return ["no crossover: the same algorithm is the cheapest at all these sizes"] if len(asked.sizes) > 1 else []
    return [f"from {format_bytes(c.size)} on {c.after} is cheaper than {c.before}" for c in crossed]


def _plotted(asked: Question, crossed: Sequence[AlgorithmCrossover]) -> list[str]:
    from motet.collectives.cost.size_sweep import ascii_plot, log_spaced_sizes, time_curves

    sizes = log_spaced_sizes(asked.sizes[0], asked.sizes[-1], _COLUMNS)
    return ascii_plot(time_curves(asked.collective, asked.cluster, sizes, asked.names), sizes, crossed)


def _refuse_plot(asked: Question) -> None:
    from motet.core.errors import InputError

    if asked.sizes == [0]:
        raise InputError(f"a {asked.collective} takes as long at every size; leave --svg and --html out")
    if len(asked.sizes) < 2:
        raise InputError(f"a plot over the one size {asked.sizes[0]} is none; give --size 1KiB..1GiB")


def _write(
    asked: Question,
    found: Sequence[AlgorithmTimeCurve],
    crossed: Sequence[AlgorithmCrossover],
    paths: tuple[Path | None, Path | None],
) -> None:
    """The picture, and the page with it."""
    from motet.cli.collectives import save
    from motet.collectives.cost.size_sweep import log_spaced_sizes, time_curves
    from motet.collectives.draw.cost_plot import cost_plot_html, cost_plot_svg

    if paths == (None, None):
        return
    sizes = log_spaced_sizes(asked.sizes[0], asked.sizes[-1], _POINTS)
    smooth = time_curves(asked.collective, asked.cluster, sizes, asked.names)
    drawn = cost_plot_svg(asked.title, smooth, sizes, crossed)
    svg, html = paths
    if svg:
        save(svg, drawn)
    if html:
        save(html, cost_plot_html(asked.title, drawn, _rows(asked, found)))


def _record(
    asked: Question, found: Sequence[AlgorithmTimeCurve], crossed: Sequence[AlgorithmCrossover]
) -> dict[str, Any]:
    return {
        "collective": asked.collective,
        "cluster": asked.cluster.name,
        "ranks": asked.cluster.ranks,
        "sizes": asked.sizes,
        "algorithms": [
            {
                "algorithm": c.algorithm,
                "seconds": c.seconds,
                "options": [dict(best.options) for best in c.best_candidates],
            }
            for c in found
        ],
        "cheapest": _cheapest(asked),
        "crossovers": [{"size": c.size, "before": c.before, "after": c.after} for c in crossed],
    }
