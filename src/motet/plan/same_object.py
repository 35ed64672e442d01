"""A key of caches for objects that are large to compare: it equals a key of the same object alone."""

from typing import Generic, TypeVar

T = TypeVar("T")


class SameObject(Generic[T]):
    """Keeps its object alive, so that no other can take over the identity."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        """The object is compared by identity."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
