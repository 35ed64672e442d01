"""The one tree by which what the rows of a global batch give is added, whoever has computed which rows.

It halves the rows again and again. A rank adds what lies within its rows; the same additions are done in every layout.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class SummationTreeNode(NamedTuple):
    """The sum over rows `first` to `stop` - 1."""

    first: int
    stop: int

    @property
    def children(self) -> tuple["SummationTreeNode", "SummationTreeNode"]:
        middle = (self.first + self.stop + 1) // 2
        return SummationTreeNode(self.first, middle), SummationTreeNode(middle, self.stop)


def maximal_subtrees(rows: range, count: int) -> list[SummationTreeNode]:
    """The largest sums of the tree over `count` rows that `rows`, which are neighbours, are enough for, in order."""
    todo, subtrees = [SummationTreeNode(0, count)], []
    while todo:
        node = todo.pop()
        if rows.start <= node.first and node.stop <= rows.stop:
            subtrees.append(node)
        elif node.first < rows.stop and rows.start < node.stop:
            todo += reversed(node.children)
    return subtrees


class PartialTreeSums(Generic[Value]):
    """Sums that wait for their other halves."""

    def __init__(self, count: int, add: Callable[[Value, Value], Value]) -> None:
        """`add`: what comes first in the order of rows is given first."""
        self.pending: dict[SummationTreeNode, Value] = {}
        self._parents = _parents(count)
        self._add = add

    def add(self, node: SummationTreeNode, value: Value) -> None:
        """In any order, each once."""
        while node in self._parents:
            parent = self._parents[node]
            left, right = parent.children
            sibling = right if node == left else left
            if sibling not in self.pending:
                break
            sibling_value = self.pending.pop(sibling)
            value = self._add(value, sibling_value) if node == left else self._add(sibling_value, value)
            node = parent
        assert node not in self.pending, node
        self.pending[node] = value

    def pop_all(self) -> dict[SummationTreeNode, Value]:
        """What is there, in the order of rows; nothing of it stays."""
        taken = {node: self.pending[node] for node in sorted(self.pending)}
        self.pending.clear()
        return taken


@lru_cache(maxsize=16)
def _parents(count: int) -> dict[SummationTreeNode, SummationTreeNode]:
    todo, parents = [SummationTreeNode(0, count)], {}
    while todo:
        node = todo.pop()
        if node.stop - node.first > 1:
            parents.update(dict.fromkeys(node.children, node))
            todo += node.children
    return parents
