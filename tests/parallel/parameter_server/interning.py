"""Values that are told apart by what they hold, as numbers: equal ones have the same."""

from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

Thing = TypeVar("Thing")
UNORDERED = ("workers", "servers", "waiting_pulls")
"""Lists whose order does nothing but to send messages in that order."""


class InternTable(Generic[Thing]):
    def __init__(self, *first: Thing) -> None:
        self._things: list[Thing] = []
        self._numbers: dict[Any, int] = {}
        self._renamed: dict[tuple[int, int], int] = {}
        for thing in first:
            self.number(thing)

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> Thing:
        return self._things[number]

    def number(self, thing: Thing) -> int:
        key = key_of(thing)
        if key not in self._numbers:
            self._numbers[key] = len(self._things)
            self._things.append(thing)
        return self._numbers[key]

    def renamed(self, number: int, swap: int, names: dict[str, str]) -> int:
        """The same with other names of processes: always the same names for one `swap`."""
        key = number, swap
        if key not in self._renamed:
            self._renamed[key] = self.number(with_names(self._things[number], names))
        return self._renamed[key]


def key_of(value: Any, ordered: bool = False) -> Any:
    """The same for values that are equal, and no others. Of what was done the order counts."""
    if is_dataclass(value):
        state = ((f.name, getattr(value, f.name)) for f in fields(value))
        return type(value).__name__, *(
            key_of(set(v) if name in UNORDERED else v, name == "completed_reports") for name, v in state
        )
    if isinstance(value, set):
        return "set", *sorted(value)
    if isinstance(value, dict):
        return "dict", *((key, key_of(item)) for key, item in (value.items() if ordered else sorted(value.items())))
    if isinstance(value, list):
        return "list", *map(key_of, value)
    if type(value) is tuple:
        return tuple(map(key_of, value))
    return (type(value).__name__, value) if isinstance(value, tuple) else value


def with_names(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if is_dataclass(value):
        return type(value)(**{f.name: with_names(getattr(value, f.name), names) for f in fields(value)})
    if isinstance(value, dict):
        return {with_names(key, names): with_names(item, names) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_names(item, names) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(with_names(item, names) for item in value)
    return value
