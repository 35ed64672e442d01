"""Two simultaneous binary trees, each for half of the data: an inner rank of one tree is a leaf of the other.

Every rank sends and receives all the time, as in a ring, and distances grow with log(ranks), as in a tree. After
Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from motet.collectives.algorithms.rank_arithmetic import check_pieces
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm
from motet.collectives.compose import concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, copy_chunk


class _BinaryTreeEdge(NamedTuple):
    tree: int
    parent: int
    child: int


def _parent(label: int, last_label: int) -> int:
    """The parent in a binary search tree over 1 .. last whose odd labels are leaves; 0 for the root."""
    bit = label & -label
    parent = (label ^ bit) | (bit << 1)
    return parent if parent <= last_label else label ^ bit


def _edges(ranks: int) -> tuple[list[_BinaryTreeEdge], tuple[int, int]]:
    edges: list[_BinaryTreeEdge] = []
    roots = [0, 0]
    # The second tree is the mirror image, or shifted by one if a mirror image would have the same leaves.
    is_even = ranks % 2 == 0
    rank_of_label = {label: (label - 1, ranks - label if is_even else label % ranks) for label in range(1, ranks + 1)}
    for label in sorted(rank_of_label, key=lambda label: _level(label, ranks)):
        parent = _parent(label, ranks)
        for tree in (0, 1):
            if parent:
                edges.append(_BinaryTreeEdge(tree, rank_of_label[parent][tree], rank_of_label[label][tree]))
            else:
                roots[tree] = rank_of_label[label][tree]
    return edges, (roots[0], roots[1])


def _level(label: int, last_label: int) -> int:
    parent = _parent(label, last_label)
    return 0 if not parent else 1 + _level(parent, last_label)


def _edge_colours(edges: list[_BinaryTreeEdge]) -> dict[_BinaryTreeEdge, int]:
    """Edges of colour 0 are used in even steps, edges of colour 1 in odd steps.

    No rank sends, or receives, over two edges of one colour. A rank has at most two edges of each kind, so edges that
    share a rank form paths and circles of even length, whose colours alternate.
    """
    edges_by_port: dict[tuple[str, int], list[_BinaryTreeEdge]] = {}
    for edge in edges:
        edges_by_port.setdefault(("send", edge.parent), []).append(edge)
        edges_by_port.setdefault(("receive", edge.child), []).append(edge)
    colours: dict[_BinaryTreeEdge, int] = {}
    for first in edges:
        todo = [(first, 0)] if first not in colours else []
        while todo:
            edge, colour = todo.pop()
            if edge in colours:
                continue
            colours[edge] = colour
            adjacent = edges_by_port["send", edge.parent] + edges_by_port["receive", edge.child]
            todo += [(other, 1 - colour) for other in adjacent if other not in colours]
    return colours


@lru_cache(maxsize=256)
def _first_crossing_steps(ranks: int) -> dict[_BinaryTreeEdge, int]:
    """The step in which the first piece crosses each edge; the others follow every `_steps_between_pieces`."""
    edges, roots = _edges(ranks)
    colours = _edge_colours(edges)
    arrival = dict.fromkeys(enumerate(roots), -1)
    crossing: dict[_BinaryTreeEdge, int] = {}
    for edge in edges:
        ready = arrival[edge.tree, edge.parent] + 1
        crossing[edge] = ready + (ready + colours[edge]) % 2
        arrival[edge.tree, edge.child] = crossing[edge]
    return crossing


def _steps_one_way(ranks: int, pieces: int) -> int:
    """Steps in one direction: the depth, at most twice the levels of the tree, and the delay of the later pieces."""
    return max(_first_crossing_steps(ranks).values()) + 1 + _steps_between_pieces(ranks) * (pieces - 1)


def _steps_between_pieces(ranks: int) -> int:
    """A piece waits for the next step of its edge's colour; two ranks need only one colour."""
    return 1 if ranks == 2 else 2


def _double_tree_cost(ranks: int, pieces: int = 8) -> AlphaBetaGammaCost:
    steps = _steps_one_way(ranks, pieces)
    return AlphaBetaGammaCost(2 * steps, Fraction(2 * steps, 2 * pieces), Fraction(steps, 2 * pieces))


@algorithm("all-reduce", "double-tree", cost=_double_tree_cost)
def all_reduce_double_tree(ranks: int, pieces: int = 8) -> Program:
    """Reduce and broadcast over two complementary binary trees, each with half of the data, in successive pieces."""
    check_pieces(pieces, ranks)
    down = _broadcast_down_trees(ranks, pieces)
    return concatenate(reverse(down, "reduce"), down, "all-reduce", "double-tree")


def _broadcast_down_trees(ranks: int, pieces: int) -> Program:
    _, roots = _edges(ranks)
    pace = _steps_between_pieces(ranks)
    steps: list[list[ChunkTransfer]] = [[] for _ in range(_steps_one_way(ranks, pieces))]
    for edge, first in _first_crossing_steps(ranks).items():
        for piece in range(pieces):
            steps[first + pace * piece].append(copy_chunk(edge.parent, edge.child, edge.tree * pieces + piece))
    chunks = range(2 * pieces)
    source = {chunk: (roots[chunk // pieces],) for chunk in chunks}
    initial = tuple(tuple(chunk for chunk in chunks if source[chunk] == (rank,)) for rank in range(ranks))
    frozen_steps = tuple(map(tuple, steps))
    return Program("broadcast", "double-tree", ranks, (1,) * len(chunks), initial, (source,) * ranks, frozen_steps)
