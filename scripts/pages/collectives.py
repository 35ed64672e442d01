"""Pictures and tables of the pages on collectives.

The closed forms are repeated here as formulas for people, each with its derivation; a test compares them with
`motet.collectives.closed_form` at every number of ranks.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from motet.cluster.cluster import load_cluster
from motet.collectives import algorithm_names, build, closed_form, collective_names
from motet.collectives.algorithms import find_algorithm
from motet.collectives.algorithms.rank_arithmetic import (
    doubling_rounds,
    floor_power_of_two,
    hosts_and_ranks_per_host,
    split_over_hosts,
)
from motet.collectives.algorithms.rank_arithmetic import grid_dims as lengths_of
from motet.collectives.cost.cheapest_algorithm import crossovers, log_spaced_sizes, time_curves
from motet.collectives.cost.group_shapes import LIBRARY, LINK_CLASSES, PROTOCOLS
from motet.collectives.draw.cost_plot import cost_plot_svg
from motet.collectives.draw.frames import program_text
from motet.collectives.draw.program_drawing import program_animation, program_svg
from pages import fill_blocks, markdown_table

ALPHA, BETA, GAMMA = "\N{GREEK SMALL LETTER ALPHA}", "S\N{GREEK SMALL LETTER BETA}", "S\N{GREEK SMALL LETTER GAMMA}"


# --- closed forms, as people write them --------------------------------------------------------------


class Formula(NamedTuple):
    """Start-ups, bytes sent in turn and bytes added in turn (both as parts of S), and why."""

    alpha: str
    beta: str
    gamma: str
    why: str


_RING = ("2*(N-1)", "2*(N-1)/N", "(N-1)/N")
_TORUS = ("2*A*W", "2*(N-1)/N", "(N-1)/N")
FORMULAS: dict[str, Formula] = {
    "broadcast/flat": Formula("N-1", "N-1", "0", "The root sends all of S to N-1 ranks, one after another."),
    "broadcast/ring": Formula("N-1", "N-1", "0", "S crosses N-1 links, one after another."),
    "broadcast/pipelined-ring": Formula(
        "N-2+P", "(N-2+P)/P", "0",
        "The first of P pieces needs N-1 steps to the last rank; the other P-1 follow, one a step. A step moves S/P.",
    ),
    "broadcast/tree": Formula("L", "L", "0", "Who has S doubles in every step, and each step moves all of it."),
    "broadcast/scatter-all-gather": Formula(
        "L+N-1", "2*(N-1)/N", "0", "A scatter over a tree, then an all-gather around a ring: the sum of the two."
    ),
    "reduce/flat": Formula("N-1", "N-1", "N-1", "The root takes S from N-1 ranks and adds it, one after another."),
    "reduce/ring": Formula(
        "N-2+P", "(N-2+P)/P", "(N-2+P)/P", "The pipelined broadcast backwards; what arrives is added."
    ),
    "reduce/tree": Formula("L", "L", "L", "The broadcast over a tree backwards."),
    "all-reduce/flat": Formula("2*(N-1)", "2*(N-1)", "N-1", "A flat reduce, then a flat broadcast."),
    "all-reduce/naive": Formula(
        "N-1", "N-1", "N-1", "One step, but each rank's one port carries N-1 messages of S, and it adds N-1 times S."
    ),
    "all-reduce/direct": Formula(
        *_RING, "Two steps of N-1 messages of S/N through one port: the traffic of the ring without its waiting."
    ),
    "all-reduce/ring": Formula(
        *_RING,
        "Reduce-scatter and all-gather, N-1 steps each, every step S/N. Only the first half adds.",
    ),
    "all-reduce/bidirectional-ring": Formula(
        "2*d*(N-1)", "2*(N-1)/N", "(N-1)/N",
        "The steps of the ring; in each, two messages of half the size leave through the one port (d = 2). "
        "Of two ranks both neighbours are one (d = 1).",
    ),
    "all-reduce/tree": Formula("2*L", "2*L", "L", "Reduce over a tree, then broadcast over it, all of S each time."),
    "all-reduce/double-tree": Formula(
        "2*(2*q-1+f+p*(P-1))", "(2*q-1+f+p*(P-1))/P", "(2*q-1+f+p*(P-1))/(2*P)",
        "2q-1+f steps until the last rank has the first of the P pieces, p more for each other one, and as many up as "
        "down; in each a port carries one of the 2P parts of S. Derived [below](#the-double-tree).",
    ),
    "all-reduce/recursive-doubling": Formula(
        "q+2*e", "q+2*e", "q+e",
        "The ranks that are a power of two exchange all of S with q partners. Others give S before and get it after.",
    ),
    "all-reduce/halving-doubling": Formula(
        "2*q+2*e", "2*(Q-1)/Q+2*e", "(Q-1)/Q+e",
        "Halving sends S/2, S/4, ... S/Q, together S (Q-1)/Q, and doubling the same back. Others as above.",
    ),
    "all-reduce/hierarchical": Formula(
        "2*l+2*(H-1)", "2*l+2*(H-1)/H", "l+(H-1)/H",
        "A tree of the M ranks of the largest host up, with l = log2 M rounded up; a ring of H leaders; a tree down.",
    ),
    "all-reduce/hierarchical-sharded": Formula(
        "2*(H-1+M-1)", "2*(N-1)/N", "(N-1)/N",
        "Reduce-scatter in the host, M-1 steps of S/M; around the H ranks with the same share, 2(H-1) steps of S/N; "
        "all-gather in the host. (M-1)/M + (H-1)/N = (N-1)/N, twice.",
    ),
    **{
        f"all-reduce/torus{axes}": Formula(
            *_TORUS,
            "2A parts of S at the same time, each reduce-scattered along all A dimensions, in its own order and "
            "direction, and gathered back. Along a dimension of length d each part takes d-1 messages there and d-1 "
            "back; on one port all of them take turns. Where d = 2 both directions are one message. On a torus, with a "
            "port for each neighbour, the parts travel together, and the time is up to 2A times shorter.",
        )
        for axes in ("", "-2d", "-3d", "-5d")
    },
    "all-reduce/mesh-2d": Formula(
        "2*(a+c)", "2*(a/X+c/N)", "a/X+c/N",
        "Along the rows and columns of an X by Y grid that does not wrap around. a and c are the messages of the "
        "busiest port of a line of X and of Y ranks (see all-gather/line).",
    ),
    "reduce-scatter/direct": Formula("N-1", "(N-1)/N", "(N-1)/N", "One step of N-1 messages of S/N through one port."),
    "reduce-scatter/ring": Formula("N-1", "(N-1)/N", "(N-1)/N", "N-1 steps of S/N, each added where it arrives."),
    "reduce-scatter/recursive-halving": Formula(
        "q+2*e", "(Q-1+G+e*N)/N", "(Q-1+G+e*N)/N", "The all-gather by recursive doubling backwards."
    ),
    "reduce-scatter/bruck": Formula("L", "(N-1)/N", "(N-1)/N", "Bruck's all-gather backwards."),
    "reduce-scatter/hierarchical": Formula(
        "H-1+M-1", "(N-1)/N", "(N-1)/N", "The hierarchical all-gather backwards."
    ),
    "reduce-scatter/line": Formula("b", "b/N", "b/N", "The all-gather along a line backwards."),
    "all-gather/direct": Formula("N-1", "(N-1)/N", "0", "One step of N-1 messages of S/N through one port."),
    "all-gather/ring": Formula("N-1", "(N-1)/N", "0", "N-1 steps of S/N: each chunk has N-1 links to cross."),
    "all-gather/recursive-doubling": Formula(
        "q+2*e", "(Q-1+G+e*N)/N", "0",
        "Chunks double: 1 + 2 + 4 + ... = Q-1. Where N is no power of two the first ranks also carry for the others, G "
        "chunks more, and hand them N-1 at the end, after one at the start.",
    ),
    "all-gather/bruck": Formula(
        "L", "(N-1)/N", "0", "Chunks double over ever larger distances; the last step sends only what is missing."
    ),
    "all-gather/hierarchical": Formula(
        "H-1+M-1", "(N-1)/N", "0", "H-1 steps of S/N across, then M-1 of S/M in the host: (H-1)/N + (M-1)/M = (N-1)/N."
    ),
    "all-gather/line": Formula(
        "b", "b/N", "0",
        "N-1 steps of S/N. In the first floor((N+1)/2) of them some rank in the middle passes on chunks to both sides, "
        "so that its port carries two: b = N-1 + floor((N+1)/2), and 1 of two ranks.",
    ),
    "gather/flat": Formula("N-1", "(N-1)/N", "0", "The root takes S/N from N-1 ranks, one after another."),
    "gather/tree": Formula("L", "(N-1)/N", "0", "The root still takes N-1 chunks, in L bundles."),
    "scatter/flat": Formula("N-1", "(N-1)/N", "0", "The root sends S/N to N-1 ranks, one after another."),
    "scatter/tree": Formula("L", "(N-1)/N", "0", "The root still sends N-1 chunks, in L bundles."),
    "all-to-all/pairwise": Formula("N-1", "(N-1)/N", "0", "N-1 steps of S/N, straight to where it belongs."),
    "all-to-all/bruck": Formula(
        "L", "B/N", "0", "A chunk with d places to go is sent once for each 1 among the bits of d."
    ),
    "all-to-all/hierarchical": Formula(
        "2*(M-1)+H-1", "2*(M-1)*(N-1)/N+(H-1)*M/H", "0",
        "The leader takes N-1 chunks from each of M-1 ranks, exchanges M*M chunks with H-1 leaders, and hands all out.",
    ),
    "all-to-all/hierarchical-sharded": Formula(
        "M-1+H-1", "(M-1)/M+(H-1)/H", "0", "M-1 steps of H chunks in the host, then H-1 steps of M chunks across."
    ),
    "barrier/dissemination": Formula("L", "(N-1)/N", "0", "Bruck's all-gather of tokens; S is N of them: nothing."),
    **{f"{name}/direct": Formula("1", "1", "0", "One message.") for name in ("send", "copy", "signal")},
}  # fmt: skip


def letters(name: str, ranks: int) -> dict[str, int]:
    """Values of the letters in the formulas, with the default options of an algorithm."""
    power = floor_power_of_two(ranks)
    rest = ranks - power
    known = {
        "N": ranks,
        "L": doubling_rounds(ranks),
        "P": 8,
        "Q": power,
        "q": power.bit_length() - 1,
        "e": int(rest > 0),
    }
    known |= {"d": 1 if ranks == 2 else 2, "b": _line(ranks), "B": sum(n.bit_count() for n in range(ranks))}
    known["G"] = sum(min(1 << bit, rest) for bit in range(known["q"]))
    if name.endswith("/hierarchical") and name.startswith("all-reduce"):
        hosts = split_over_hosts(ranks, None)
        known |= {"H": len(hosts), "M": max(map(len, hosts)), "l": doubling_rounds(max(map(len, hosts)))}
    elif "hierarchical" in name:
        known["H"], known["M"] = hosts_and_ranks_per_host(ranks, None)
    elif "torus" in name:
        lengths = lengths_of(ranks, None, int(name[-2])) if name.endswith("d") else (ranks,)
        known |= {"A": len(lengths), "W": sum((d - 1) * (1 if d == 2 else 2) for d in lengths)}
    elif "mesh" in name:
        rows, columns = lengths_of(ranks, None, 2)
        known |= {"X": rows, "a": _line(rows), "c": _line(columns)}
    elif "double-tree" in name:
        known["p"] = 1 if ranks == 2 else 2
        known["f"] = len(build(*name.split("/"), ranks, pieces=1).steps) // 2 - (2 * known["q"] - 1)
        assert known["f"] in (0, 1)
    return known


def _line(ranks: int) -> int:
    return 1 if ranks == 2 else ranks - 1 + (ranks + 1) // 2


def value(formula: str, known: dict[str, int]) -> Fraction:
    """The exact value of a formula with numbers in place of letters."""
    exact = {name: Fraction(number) for name, number in known.items()}
    return Fraction(eval(formula, {"__builtins__": {}}, exact))  # formulas of this file only


def _shown(formula: str) -> str:
    """Write a formula as people do: 2(N-1)/N."""
    return formula.replace("*", "")


# --- tables --------------------------------------------------------------------------------------------


def all_reduce_table() -> str:
    """The costs of all-reduces at 8 and at 64 ranks, from `closed_form` and from their Programs."""
    rows = []
    for name in algorithm_names("all-reduce"):
        cells = [f"`{name}`"]
        known = find_algorithm("all-reduce", name)
        for ranks in (8, 64):
            if known.supports(ranks):
                made = build("all-reduce", name, ranks)
                cells += [str(len(made.steps)), _part(max(map(made.send_fraction, range(ranks)))), _cost(name, ranks)]
            else:
                cells += ["", "", ""]
        rows.append(cells)
    head = ["algorithm", "rounds at 8", "bytes per rank", "cost", "rounds at 64", "bytes per rank", "cost"]
    return markdown_table(head, rows)


def _cost(name: str, ranks: int) -> str:
    terms = closed_form("all-reduce", name, ranks)
    return f"{terms.alpha} {ALPHA} + {_part(terms.beta, BETA)} + {_part(terms.gamma, GAMMA)}"


def _part(share: Fraction, of: str = "S") -> str:
    """`1.75 S`"""
    return f"{float(share):.4g} {of}"


def identities_table() -> str:
    """An all-reduce against the two halves that it is made of."""
    rows = []
    for ranks in (4, 8, 64):
        made = [build(c, "ring", ranks) for c in ("reduce-scatter", "all-gather", "all-reduce")]
        rows.append([str(ranks), *(f"{len(p.steps)} rounds, {_part(p.send_fraction(0))}" for p in made)])
    return markdown_table(["N", "reduce-scatter", "all-gather", "all-reduce"], rows)


def closed_forms() -> str:
    """All closed forms, a table for each collective."""
    parts = []
    for collective in collective_names():
        rows = []
        for name in algorithm_names(collective):
            formula = FORMULAS[f"{collective}/{name}"]
            rows.append([f"`{name}`", *map(_shown, formula[:3]), formula.why])
        parts.append(f"## {collective}\n\n{markdown_table(['algorithm', ALPHA, BETA, GAMMA, 'why'], rows)}")
    return "\n".join(parts)


def example() -> str:
    """A Program as JSON."""
    return f"```json\n{build('all-reduce', 'ring', 2).to_json()}```\n"


def drawn() -> str:
    """The output of `motet collectives draw`."""
    return f"```\n{program_text(build('all-reduce', 'ring', 3))}```\n"


# --- pictures and pages ----------------------------------------------------------------------------------


def cost_picture() -> str:
    """All-reduce of eight hosts of eight GPUs."""
    cluster = load_cluster("dgx-h100", hosts=8)
    sizes = log_spaced_sizes(2**10, 2**30, 81)
    found = time_curves("all-reduce", cluster, sizes)
    crossed = crossovers("all-reduce", cluster, sizes[0], sizes[-1])
    return cost_plot_svg("all-reduce of 64 ranks on dgx-h100, 8 hosts: predicted time", found, sizes, crossed)


def _program_picture(collective: str, algorithm: str, ranks: int, **options: int) -> str:
    return program_svg(build(collective, algorithm, ranks, **options))


_DRAWN_ALL_REDUCES: dict[str, dict[str, int]] = {
    **{name: {} for name in ("ring", "flat", "naive", "direct", "tree", "recursive-doubling", "halving-doubling")},
    "hierarchical": {"hosts": 2},
    "hierarchical-sharded": {"hosts": 2},
    "double-tree": {"pieces": 2},
}


def library_constants() -> str:
    """The constants of vendor libraries, each with its origin."""
    links = [
        [
            name,
            f"{link.efficiency:.3g}",
            f"{link.in_switch_efficiency:.3g}" if link.in_switch_efficiency else "",
            f"{link.one_way_efficiency:.3g}" if link.one_way_efficiency else "",
            f"{link.hop_s * 1e6:.3g} \N{MICRO SIGN}s",
            link.origin,
        ]
        for name, link in LINK_CLASSES.items()
    ]
    protocols = [
        [name, f"{each.inside:.3g}", f"{each.between:.3g}", f"{each.rate:.3g}", each.origin]
        for name, each in PROTOCOLS.items()
    ]
    library = [[name, f"{each.value:.3g}", each.origin] for name, each in LIBRARY.items()]
    return "\n".join(
        (
            markdown_table(["links", "efficiency", "in the switch", "one way", "start-up of a hop", "origin"], links),
            markdown_table(["protocol", "hop inside", "hop between", "rate", "origin"], protocols),
            markdown_table(["library", "seconds or share", "origin"], library),
        )
    )


PICTURES: dict[str, Callable[[], str]] = {
    **{
        f"{name}.svg": partial(_program_picture, "all-reduce", name, 4, **options)
        for name, options in _DRAWN_ALL_REDUCES.items()
    },
    "ring-animated.svg": lambda: program_animation(build("all-reduce", "ring", 4)),
    "ring-first-steps.svg": lambda: program_svg(build("all-reduce", "ring", 4), only_steps=(-1, 0)),
    "all-gather-bruck.svg": partial(_program_picture, "all-gather", "bruck", 5),
    "cost.svg": cost_picture,
}
BLOCKS = {
    "guide/all-reduce.md": {"costs": all_reduce_table, "halves": identities_table},
    "reference/collective-costs.md": {"closed forms": closed_forms},
    "reference/program.md": {"example": example},
    "guide/collectives.md": {"drawn": drawn},
    "benchmarks/vendor-collectives.md": {"constants": library_constants},
}


def page(name: str) -> str:
    """A page with its current tables."""
    return fill_blocks(name, {block: make() for block, make in BLOCKS[name].items()})
