"""The table of algorithms: each a function from a number of ranks to a Program, with the closed form of its cost.

`@algorithm(collective, name, cost)` puts a function in the table; from then on it can be executed, costed, proven,
drawn and benchmarked.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from motet.collectives.score import Program
from motet.core.errors import InputError

Number = float | Fraction

MOST_AXES = 6
"""Of a grid whose number of dimensions is free: its data are in two parts for each."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A time as a sum: `alpha` start-ups, `beta` times S bytes on the wire, `gamma` times S bytes added up."""

    alpha: int
    beta: Fraction
    gamma: Fraction = Fraction(0)

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma)

    @property
    def adding(self) -> "Terms":
        """The same, where all that arrives is added."""
        return replace(self, gamma=self.beta)

    def seconds(self, alpha_s: Number, beta_s: Number, gamma_s: Number) -> Number:
        """With the start-up of a message, and the times of S bytes on the wire and in the adder."""
        return self.alpha * alpha_s + self.beta * beta_s + self.gamma * gamma_s

    def times(self, count: int, share: Fraction = Fraction(1)) -> "Terms":
        """So many times in turn, each time on a share of S."""
        return Terms(self.alpha * count, self.beta * count * share, self.gamma * count * share)


def message(share: Fraction | int = 1, adds: Fraction | int = 0) -> Terms:
    """One message with a share of S, of which a share is added up where it arrives."""
    return Terms(1, Fraction(share), Fraction(adds))


Build = Callable[..., Program]
Cost = Callable[..., Terms]
Takes = Callable[[int], bool]


@dataclass(frozen=True)
class Algorithm:
    """One way of doing a collective."""

    collective: str
    name: str
    build: Build
    cost: Cost
    """The closed form on a network where every rank has one full-duplex port."""
    takes: Takes
    options: tuple[str, ...]
    same_bits: bool
    """Every rank adds in the same order."""

    @property
    def axes(self) -> tuple[int, ...]:
        """How many dimensions it can have, if it has dimensions."""
        if "dims" not in self.options:
            return ()
        return (int(self.name[-2]),) if self.name.endswith("d") else tuple(range(1, MOST_AXES + 1))

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def refuse(self, ranks: int) -> None:
        """Raise, with the counts that it can take, if it cannot take so many ranks."""
        if not _is_whole(ranks):
            raise InputError(f"ranks: {ranks!r} is no whole number; give 2 or more")
        if ranks < 2:
            raise InputError(f"{ranks} ranks: {self.collective}/{self.name} needs at least 2")
        if not self.takes(ranks):
            possible = ", ".join(str(count) for count in range(2, 65) if self.takes(count))
            raise InputError(f"{ranks} ranks: {self.collective}/{self.name} takes {possible} (of 2 to 64)")


_COLLECTIVES = (
    "broadcast", "reduce", "all-reduce", "reduce-scatter", "all-gather", "gather", "scatter", "all-to-all", "barrier",
    "send", "copy", "signal",
)  # fmt: skip
_ALGORITHMS: dict[str, dict[str, Algorithm]] = {collective: {} for collective in _COLLECTIVES}


def algorithm(
    collective: str, name: str, cost: Cost, takes: Takes = lambda ranks: True, *, same_bits: bool = True
) -> Callable[[Build], Build]:
    """Put a function in the table."""

    def register(build: Build) -> Build:
        options = tuple(list(inspect.signature(build).parameters)[1:])
        _ALGORITHMS[collective][name] = Algorithm(collective, name, build, cost, takes, options, same_bits)
        return build

    return register


def collectives() -> tuple[str, ...]:
    """The names of all collectives."""
    return tuple(_ALGORITHMS)


def algorithms(collective: str) -> tuple[str, ...]:
    """The names of the algorithms of a collective."""
    return tuple(_of(collective))


def find(collective: str, name: str) -> Algorithm:
    found = _of(collective)
    if not isinstance(name, str) or name not in found:
        raise InputError(f"{collective} has no algorithm {name!r}; it has {_list(found)}{_nearest(name, found)}")
    return found[name]


def program(collective: str, algorithm: str, ranks: int, **options: object) -> Program:
    """The Program of an algorithm for so many ranks. Options such as `root`, `pieces`, `hosts` or `dims` are the
    algorithm's own."""
    found = find(collective, algorithm)
    found.refuse(ranks)
    return found.build(ranks, **_known(found, options))


def closed_form(collective: str, algorithm: str, ranks: int, **options: object) -> Terms:
    """What the algorithm costs on a uniform network."""
    found = find(collective, algorithm)
    found.refuse(ranks)
    known = _known(found, options)
    wanted = inspect.signature(found.cost).parameters
    return found.cost(ranks, **{name: value for name, value in known.items() if name in wanted})


def _known(found: Algorithm, options: dict[str, object]) -> dict[str, object]:
    for name in options:
        if name not in found.options:
            has = f"has the options {_list(found.options)}" if found.options else "has no options"
            raise InputError(f"{found.collective}/{found.name} has no option {name!r}; it {has}")
        _refuse_value(name, options[name])
    return {name: value for name, value in options.items() if value is not None}


def _refuse_value(name: str, value: object) -> None:
    """Options of these names are whole numbers, and `dims` several; others are their algorithm's own business."""
    if value is None:
        return
    if name == "dims" and not (isinstance(value, list | tuple) and value and all(map(_is_whole, value))):
        raise InputError(f"dims: {value!r} are no whole numbers; give them as in dims=(4, 4)")
    if name in ("root", "pieces", "hosts", "src", "dst") and not _is_whole(value):
        raise InputError(f"{name}: {value!r} is no whole number; give one, as in {name}=1")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of(collective: str) -> dict[str, Algorithm]:
    if not isinstance(collective, str) or collective not in _ALGORITHMS:
        raise InputError(
            f"there is no collective {collective!r}; there are {_list(_ALGORITHMS)}{_nearest(collective, _ALGORITHMS)}"
        )
    return _ALGORITHMS[collective]


def _list(names: object) -> str:
    assert isinstance(names, dict | tuple)
    return ", ".join(names)


_OTHER_HALVES = {"receive": "send", "recv": "send", "wait": "signal"}
"""A Program has both ends in it: what other libraries call so is the other rank's half."""


def nearest(collective: str) -> str:
    """The name of a collective that may be meant, as ` (nearest: NAME)`; nothing if none is near."""
    return _nearest(collective, _ALGORITHMS)


def _nearest(name: object, names: Iterable[str]) -> str:
    plain = str(name).lower().replace("_", "-")
    close = [_OTHER_HALVES[plain]] if plain in _OTHER_HALVES else difflib.get_close_matches(plain, names, n=1)
    return f" (nearest: {close[0]})" if close else ""
