"""Curves over message size: they are the costs, they cross where two costs are equal, and the pictures show them."""

import re
import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import pairwise

import pytest

from motet.cluster.cluster import Cluster, uniform_cluster
from motet.collectives.algorithms import build, closed_form
from motet.collectives.cost.alpha_beta import estimate_cost
from motet.collectives.cost.cheapest_algorithm import cheapest, crossovers, log_spaced_sizes, time_curves
from motet.collectives.draw.cost_plot import _spread_labels, ascii_plot, cost_plot_html, cost_plot_svg
from motet.core.units import format_seconds

NET = uniform_cluster(8, 1e-5, 1e9)
SIZES = log_spaced_sizes(1024, 2**30, 64)


def where_equal(first: str, second: str, cluster: Cluster) -> float:
    """a1 alpha + b1 beta S = a2 alpha + b2 beta S, solved for S on paper."""
    one, two = (closed_form("all-reduce", name, cluster.ranks) for name in (first, second))
    alpha, bandwidth = Fraction("1e-5"), 10**9
    return float((two.alpha - one.alpha) * alpha * bandwidth / (one.beta - two.beta))


def test_a_curve_is_the_cost_of_the_program_with_the_best_pieces_at_each_size() -> None:
    (ring,) = time_curves("all-reduce", NET, SIZES, ("ring",))
    exact = estimate_cost(build("all-reduce", "ring", 8), NET)
    assert ring.seconds == tuple(float(exact.seconds(size)) for size in SIZES)
    (tree,) = time_curves("all-reduce", NET, SIZES, ("double-tree",))
    chosen = [dict(candidate.options)["pieces"] for candidate in tree.best_candidates]
    assert (chosen[0], chosen[-1]) == (1, 64) and chosen == sorted(chosen)


def test_they_cross_where_the_closed_forms_are_equal_and_auto_picks_the_one_that_is_named() -> None:
    names = ("recursive-doubling", "halving-doubling")
    assert crossovers("all-reduce", NET, 1024, 1024) == []
    (crossed,) = crossovers("all-reduce", NET, 1024, 2**30, names)
    assert (crossed.before, crossed.after) == names
    assert crossed.size == pytest.approx(where_equal(*names, NET), rel=1e-3)
    found = crossovers("all-reduce", NET, 1024, 2**30)
    assert found and all(a.after == b.before and a.size < b.size for a, b in pairwise(found))
    for crossed in found:
        assert cheapest("all-reduce", crossed.size * 0.99, NET).algorithm == crossed.before
        assert cheapest("all-reduce", crossed.size * 1.01, NET).algorithm == crossed.after


def test_the_plot_shows_the_cheapest_in_capitals() -> None:
    names = ("recursive-doubling", "ring")
    found = time_curves("all-reduce", NET, SIZES, names)
    (crossed,) = crossovers("all-reduce", NET, SIZES[0], SIZES[-1], names)
    lines = ascii_plot(found, SIZES, [crossed])
    columns = ["".join(column) for column in zip(*[line[12:].ljust(64) for line in lines[:16]], strict=True)]
    at = lines[17].index("^") - 12
    assert SIZES[at - 1] < crossed.size < SIZES[at + 1]
    assert all("A" in column and "B" not in column for column in columns[:at])
    assert all("B" in column and "A" not in column for column in columns[at + 1 :])
    assert lines[-1].split() == ["a", "recursive-doubling", "b", "ring"]


def test_the_picture_has_all_curves_inside_and_all_crossovers() -> None:
    found = time_curves("all-reduce", NET, SIZES)
    crossed = crossovers("all-reduce", NET, SIZES[0], SIZES[-1])
    drawn = cost_plot_svg("a < b", found, SIZES, crossed)
    ET.fromstring(drawn)
    lines = re.findall(r'd="M([^"]*)"><title>([^<]*)</title>', drawn)
    assert [name for _, name in lines] == [curve.algorithm for curve in found]
    for points, _ in lines:
        places = [tuple(map(float, point.split())) for point in points.split(" L")]
        assert len(places) == len(SIZES) and all(78 <= x <= 838 and 52 <= y <= 512 for x, y in places)
        assert all(later[1] <= earlier[1] for earlier, later in pairwise(places))  # larger messages take longer
    assert drawn.count('class="arrow copy"') == len(crossed)
    assert len(re.findall(r"<title>[^<]*, [^<]* to [^<]*</title>", drawn)) == len(crossed) + 1


def test_equal_times_can_be_drawn_and_names_do_not_overlap() -> None:
    sizes = log_spaced_sizes(1, 4096, 5)
    root = ET.fromstring(cost_plot_svg("alike", time_curves("send", uniform_cluster(2, 1e-4, 1e30), sizes), sizes, []))
    assert "nan" not in ET.tostring(root, encoding="unicode")
    places = _spread_labels([100, 101, 102, 300, 506, 511, 512])
    assert all(b - a >= 17 for a, b in pairwise(places)) and (places[0], places[3], places[-1]) == (100, 300, 512)


def test_the_page_has_picture_and_table() -> None:
    drawn = cost_plot_html("a < b", "<svg></svg>", [["", "1 KiB"], ["ring", "* 1 us"]])
    rows = "<thead><tr><td></td><td>1 KiB</td></tr></thead><tbody><tr><td>ring</td><td>* 1 us</td></tr></tbody>"
    assert "<title>a &lt; b</title>" in drawn and rows in drawn


def test_times_are_written_with_three_digits() -> None:
    words = {9.73e-6: "9.73 us", 1.2e-7: "0.12 us", 0.0005: "500 us", 0.9997: "1 s", 62.5: "62.5 s"}
    assert {seconds: format_seconds(seconds) for seconds in words} == words
