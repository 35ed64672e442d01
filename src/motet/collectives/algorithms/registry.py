"""The table of algorithms: functions from a number of ranks to a Program, with the closed form of their cost.

A function decorated with `@algorithm(collective, name, cost)` can be executed, costed, proven, drawn and benchmarked.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from motet.cluster.cluster_settings import Number
from motet.collectives.program import Program
from motet.core.errors import InputError, check_input

MAX_AXES = 6  # The most dimensions of a torus with a free number of them, which cuts the data in two parts for each


@dataclass(frozen=True, slots=True)
class AlphaBetaGammaCost:
    """A time as a sum: `alpha` start-ups, `beta` times S bytes on the wire, `gamma` times S bytes added up."""

    alpha: int
    beta: Fraction
    gamma: Fraction = Fraction(0)

    def __add__(self, other: "AlphaBetaGammaCost") -> "AlphaBetaGammaCost":
        return AlphaBetaGammaCost(self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma)

    @property
    def with_reduction(self) -> "AlphaBetaGammaCost":
        """The cost if the receiver adds all that arrives."""
        return replace(self, gamma=self.beta)

    def seconds(self, alpha_s: Number, beta_s: Number, gamma_s: Number) -> Number:
        """The time, from the start-up of a message and the times to send and to add S bytes."""
        return self.alpha * alpha_s + self.beta * beta_s + self.gamma * gamma_s


def messages(count: int, fraction: Fraction | int = 1, *, reduced: bool = False) -> AlphaBetaGammaCost:
    """`count` messages in turn, each with a fraction of S, which the receiver adds if `reduced`."""
    beta = Fraction(fraction) * count
    return AlphaBetaGammaCost(count, beta, beta if reduced else Fraction(0))


def sharded_all_reduce_cost(ranks: int) -> AlphaBetaGammaCost:
    """A reduce-scatter and an all-gather, each of a message to or from every other rank."""
    return messages(ranks - 1, Fraction(1, ranks), reduced=True) + messages(ranks - 1, Fraction(1, ranks))


def doubling_cost(ranks: int) -> AlphaBetaGammaCost:
    """One step per doubling of the ranks, in which the busiest rank sends all chunks but one."""
    return AlphaBetaGammaCost((ranks - 1).bit_length(), Fraction(ranks - 1, ranks))


Build = Callable[..., Program]
Cost = Callable[..., AlphaBetaGammaCost]
RankCountCheck = Callable[[int], bool]
EntryT = TypeVar("EntryT")


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a collective."""

    collective: str
    name: str
    build: Build
    cost: Cost  # The closed form on a network where every rank has one full-duplex port
    supports: RankCountCheck
    options: tuple[str, ...]
    same_bits: bool  # Every rank adds in the same order

    @property
    def axes(self) -> tuple[int, ...]:
        """The numbers of dimensions that the algorithm allows; empty if it has no dimensions."""
        if "dims" not in self.options:
            return ()
        return (int(self.name[-2]),) if self.name.endswith("d") else tuple(range(1, MAX_AXES + 1))

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def check_ranks(self, ranks: int) -> None:
        """Raise an `InputError` that names supported counts if the algorithm does not support this one."""
        check_input(_is_integer(ranks), f"ranks: {ranks!r} is not a whole number; give 2 or more")
        check_input(ranks >= 2, f"{ranks} ranks: {self.collective}/{self.name} needs at least 2")
        if not self.supports(ranks):
            possible = ", ".join(str(count) for count in range(2, 65) if self.supports(count))
            raise InputError(f"{ranks} ranks: {self.collective}/{self.name} takes {possible} (of 2 to 64)")


_COLLECTIVES = (
    "broadcast", "reduce", "all-reduce", "reduce-scatter", "all-gather", "gather", "scatter", "all-to-all", "barrier",
    "send", "copy", "signal",
)  # fmt: skip
_ALGORITHMS: dict[str, dict[str, Algorithm]] = {collective: {} for collective in _COLLECTIVES}


def algorithm(
    collective: str, name: str, cost: Cost, supports: RankCountCheck = lambda ranks: True, *, same_bits: bool = True
) -> Callable[[Build], Build]:
    """Add a function to the table."""

    def register(build: Build) -> Build:
        options = tuple(list(inspect.signature(build).parameters)[1:])
        _ALGORITHMS[collective][name] = Algorithm(collective, name, build, cost, supports, options, same_bits)
        return build

    return register


def collective_names() -> tuple[str, ...]:
    """The names of all collectives."""
    return tuple(_ALGORITHMS)


def algorithm_names(collective: str) -> tuple[str, ...]:
    """The names of the algorithms of a collective."""
    return tuple(_algorithms_of(collective))


def find_algorithm(collective: str, name: str) -> Algorithm:
    return _look_up(_algorithms_of(collective), name, f"{collective} has no algorithm {name!r}; it has")


def build(collective: str, algorithm: str, ranks: int, **options: object) -> Program:
    """The Program of an algorithm, whose options may be `root`, `pieces`, `hosts`, `dims`, `src` and `dst`."""
    entry, checked = _find_checked(collective, algorithm, ranks, options=options)
    return entry.build(ranks, **checked)


def closed_form(collective: str, algorithm: str, ranks: int, **options: object) -> AlphaBetaGammaCost:
    """The cost of the algorithm on a uniform network."""
    entry, checked = _find_checked(collective, algorithm, ranks, options=options)
    cost_parameters = inspect.signature(entry.cost).parameters
    return entry.cost(ranks, **{name: value for name, value in checked.items() if name in cost_parameters})


def _find_checked(
    collective: str, name: str, ranks: int, *, options: dict[str, object]
) -> tuple[Algorithm, dict[str, object]]:
    entry = find_algorithm(collective, name)
    entry.check_ranks(ranks)
    has = f"has the options {', '.join(entry.options)}" if entry.options else "has no options"
    for option, value in options.items():
        check_input(option in entry.options, f"{collective}/{name} has no option {option!r}; it {has}")
        if option == "dims":
            is_valid = value is None or (isinstance(value, list | tuple) and value and all(map(_is_integer, value)))
            check_input(is_valid, f"dims: {value!r} are not whole numbers; give them as in dims=(4, 4)")
        elif option in ("root", "pieces", "hosts", "src", "dst"):
            is_valid = value is None or _is_integer(value)
            check_input(is_valid, f"{option}: {value!r} is not a whole number; give one, as in {option}=1")
    return entry, {option: value for option, value in options.items() if value is not None}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _algorithms_of(collective: str) -> dict[str, Algorithm]:
    return _look_up(_ALGORITHMS, collective, f"there is no collective {collective!r}; there are")


def _look_up(table: dict[str, EntryT], name: object, complaint: str) -> EntryT:
    if not isinstance(name, str) or name not in table:
        raise InputError(f"{complaint} {', '.join(table)}{nearest_name_hint(name, table)}")
    return table[name]


# Names that other libraries give to the other rank's half. A Program contains both ends.
_COUNTERPART_NAMES = {"receive": "send", "recv": "send", "wait": "signal"}


def nearest_name_hint(name: object, names: Iterable[str]) -> str:
    """The most similar of the names as ` (nearest: NAME)`; empty if none is similar."""
    plain = str(name).lower().replace("_", "-")
    close = [_COUNTERPART_NAMES[plain]] if plain in _COUNTERPART_NAMES else difflib.get_close_matches(plain, names, n=1)
    return f" (nearest: {close[0]})" if close else ""
