"""A binary tree of additions over the rows of a global batch, which does not depend on the ranks.

Each node halves its rows. A rank adds the nodes within its rows, so every layout does the same additions.
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
    """The largest nodes of the tree over `count` rows that lie within the contiguous `rows`, in order."""
    todo, subtrees = [SummationTreeNode(0, count)], []
    while todo:
        node = todo.pop()
        if rows.start <= node.first and node.stop <= rows.stop:
            subtrees.append(node)
        elif node.first < rows.stop and rows.start < node.stop:
            todo += reversed(node.children)
    return subtrees


class PartialTreeSums(Generic[Value]):
    """Sums of nodes whose siblings are not there yet."""

    def __init__(self, count: int, add: Callable[[Value, Value], Value]) -> None:
        """`add` gets the sum of the earlier rows first."""
        self.pending: dict[SummationTreeNode, Value] = {}
        self._parents = _parents(count)
        self._add = add

    def add(self, node: SummationTreeNode, value: Value) -> None:
        """Add the sum of a node, and of each parent that is complete then; nodes come in any order, each once."""
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
        """Remove and return all sums, in the order of rows."""
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
