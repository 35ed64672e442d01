"""The one tree by which what the rows of a global batch give is added, whoever has computed which rows.

It halves the rows again and again. A rank adds what lies within its rows; the same additions are done in every layout.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """The sum over rows `first` to `stop` - 1."""

    first: int
    stop: int

    @property
    def halves(self) -> tuple["Node", "Node"]:
        middle = (self.first + self.stop + 1) // 2
        return Node(self.first, middle), Node(middle, self.stop)


def largest_within(rows: range, count: int) -> list[Node]:
    """The largest sums of the tree over `count` rows that `rows`, which are neighbours, are enough for, in order."""
    todo, found = [Node(0, count)], []
    while todo:
        node = todo.pop()
        if rows.start <= node.first and node.stop <= rows.stop:
            found.append(node)
        elif node.first < rows.stop and rows.start < node.stop:
            todo += reversed(node.halves)
    return found


class Forest(Generic[Value]):
    """Sums that wait for their other halves."""

    def __init__(self, count: int, add: Callable[[Value, Value], Value]) -> None:
        """`add`: what comes first in the order of rows is given first."""
        self.waiting: dict[Node, Value] = {}
        self._parents = _parents(count)
        self._add = add

    def feed(self, node: Node, value: Value) -> None:
        """In any order, each once."""
        while node in self._parents:
            parent = self._parents[node]
            left, right = parent.halves
            other = right if node == left else left
            if other not in self.waiting:
                break
            there = self.waiting.pop(other)
            value = self._add(value, there) if node == left else self._add(there, value)
            node = parent
        assert node not in self.waiting, node
        self.waiting[node] = value

    def take(self) -> dict[Node, Value]:
        """What is there, in the order of rows; nothing of it stays."""
        taken = {node: self.waiting[node] for node in sorted(self.waiting)}
        self.waiting.clear()
        return taken


@lru_cache(maxsize=16)
def _parents(count: int) -> dict[Node, Node]:
    todo, parents = [Node(0, count)], {}
    while todo:
        node = todo.pop()
        if node.stop - node.first > 1:
            parents.update(dict.fromkeys(node.halves, node))
            todo += node.halves
    return parents
