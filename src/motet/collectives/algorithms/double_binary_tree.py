"""Two binary trees at once, each for half of the data: whoever is inside one is a leaf of the other.

So every rank sends and receives all the time, as in a ring, and distances grow with the logarithm of the ranks, as in a
tree. After Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from motet.collectives.algorithms.program_builders import check_pieces
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm
from motet.collectives.compose import concatenate, reverse
from motet.collectives.program import ChunkTransfer, Program, Step


class _BinaryTreeEdge(NamedTuple):
    tree: int
    parent: int
    child: int


def _parent(label: int, last_label: int) -> int:
    """In a binary tree over 1 .. last whose odd labels are leaves: numbers between a node's children are below it."""
    bit = label & -label
    parent = (label ^ bit) | (bit << 1)
    return parent if parent <= last_label else label ^ bit


def _edges(ranks: int) -> tuple[list[_BinaryTreeEdge], tuple[int, int]]:
    """The edges of both trees, parents before their children, and the two roots."""
    edges: list[_BinaryTreeEdge] = []
    roots = [0, 0]
    # The second tree is the mirror image, or shifted by one where a mirror would keep leaves leaves.
    rank_of_label = {
        label: (label - 1, ranks - label if ranks % 2 == 0 else label % ranks) for label in range(1, ranks + 1)
    }
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
    """In even steps the edges of colour 0 are used, in odd ones those of colour 1.

    No rank sends, or receives, over two edges of one colour: every rank has at most two of each kind, so the edges that
    meet form paths and circles of even length, which are coloured in turn.
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
    """The step in which the first piece crosses each edge; the others follow, one `_pace` apart."""
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
    """Steps in one direction: the depth, at most twice the levels of the tree, and the pace for each more piece."""
    return max(_first_crossing_steps(ranks).values()) + 1 + _steps_between_pieces(ranks) * (pieces - 1)


def _steps_between_pieces(ranks: int) -> int:
    """A piece follows the one before it when the colour of its edge comes again; two ranks need one colour only."""
    return 1 if ranks == 2 else 2


def _double_tree_cost(ranks: int, pieces: int = 8) -> AlphaBetaGammaCost:
    """Up and down; in each step every port carries at most one of the 2 * pieces parts."""
    steps = _steps_one_way(ranks, pieces)
    return AlphaBetaGammaCost(2 * steps, Fraction(2 * steps, 2 * pieces), Fraction(steps, 2 * pieces))


@algorithm("all-reduce", "double-tree", cost=_double_tree_cost)
def all_reduce_double_tree(ranks: int, pieces: int = 8) -> Program:
    """Up and down two complementary binary trees, each with half of the data, cut in pieces that follow each other."""
    check_pieces(pieces, ranks)
    down = _broadcast_down_trees(ranks, pieces)
    return concatenate(reverse(down, "reduce"), down, "all-reduce", "double-tree")


def _broadcast_down_trees(ranks: int, pieces: int) -> Program:
    """A broadcast of the first half of the chunks from one root, and of the second from the other."""
    _, roots = _edges(ranks)
    steps: list[list[ChunkTransfer]] = [[] for _ in range(_steps_one_way(ranks, pieces))]
    for edge, first in _first_crossing_steps(ranks).items():
        for piece in range(pieces):
            chunk = edge.tree * pieces + piece
            steps[first + _steps_between_pieces(ranks) * piece].append(
                ChunkTransfer(edge.parent, edge.child, chunk, chunk, "copy")
            )
    halves = tuple(range(pieces)), tuple(range(pieces, 2 * pieces))
    initial = [
        tuple(c for half, root in zip(halves, roots, strict=True) if root == r for c in half) for r in range(ranks)
    ]
    source = {chunk: (roots[chunk // pieces],) for chunk in range(2 * pieces)}
    program_steps: tuple[Step, ...] = tuple(tuple(step) for step in steps)
    return Program(
        "broadcast", "double-tree", ranks, (1,) * (2 * pieces), tuple(initial), (source,) * ranks, program_steps
    )
