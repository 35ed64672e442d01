"""Mistakes in the code that trains, as patches that the ranks of a test apply: mistakes that raise no error.

Each fault has the layouts that it breaks, the first tensor that differs, and the words of a right cause. The verifier
knows none of them. A new capability adds a file of faults.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from motet.parallel.data_parallel.communication.communicator import DataParallelCommunicator
from motet.parallel.data_parallel.zero import CommUnitAction

Patch = AbstractContextManager[object]
Plant = Callable[[int], Patch]  # Rank -> what is in place while it trains
GRADIENT = "gradient (?!norm,).*"  # Of some parameter; the norm of all comes later
LEAVES_OUT = "leaves out the contribution of"


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Plant
    layouts: tuple[str, ...]
    first: str  # A pattern of `kind name` of the first tensor that differs
    cause: str  # A pattern of the words
    model: str = "decoder"
    settings: tuple[str, ...] = ()
    is_fp16: bool = False  # It shows in the steps with an overflow
    recipe: str = ""  # It shows in the precision of this recipe alone


FAULTS: dict[str, Fault] = {}


def fault(*layouts: str, first: str, cause: str, **job: Any) -> Callable[[Plant], Plant]:
    """Register a planted mistake by the name of its function."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        assert name not in FAULTS
        FAULTS[name] = Fault(name, plant, layouts, first, cause, **job)
        return plant

    return register


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`make(original)` stands in the place of a function."""
    with patch.object(owner, name, make(owner.__dict__[name] if name in vars(owner) else getattr(owner, name))):
        yield


def around(owner: Any, name: str, call: Callable[..., Any]) -> Patch:
    """`call(original, *arguments)` is called in the place of a function."""
    return replaced(owner, name, lambda own: lambda *args, **options: call(own, *args, **options))


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """`change(result, *arguments)` is returned in the place of what a function returns."""
    return around(owner, name, lambda own, *args, **options: change(own(*args, **options), *args))


def around_action(*kinds: str, call: Callable[..., Any]) -> Patch:
    """`call(execute, communicator, action, unit_id, output, ...)` is called for the actions of these kinds."""

    def execute(own: Any, communicator: Any, action: CommUnitAction, *args: Any, **options: Any) -> Any:
        run = partial(call, own) if action.kind in kinds else own
        return run(communicator, action, *args, **options)

    return around(DataParallelCommunicator, "execute", execute)


@contextmanager
def all_of(*plants: Patch) -> Iterator[None]:
    with ExitStack() as stack:
        for each in plants:
            stack.enter_context(each)
        yield


def nothing() -> Patch:
    return ExitStack()
