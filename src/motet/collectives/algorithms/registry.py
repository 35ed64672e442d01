"""The table of algorithms: each a function from a number of ranks to a Program, with the closed form of its cost.

`@algorithm(collective, name, cost)` puts a function in the table; from then on it can be executed, costed, proven,
drawn and benchmarked.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from motet.collectives.program import Program
from motet.core.errors import InputError

Number = float | Fraction

MAX_AXES = 6  # Of a grid whose number of dimensions is free: its data are in two parts for each


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
        """The same, where all that arrives is added."""
        return replace(self, gamma=self.beta)

    def seconds(self, alpha_s: Number, beta_s: Number, gamma_s: Number) -> Number:
        """With the start-up of a message, and the times of S bytes on the wire and in the adder."""
        return self.alpha * alpha_s + self.beta * beta_s + self.gamma * gamma_s

    def times(self, count: int, fraction: Fraction = Fraction(1)) -> "AlphaBetaGammaCost":
        """So many times in turn, each time on a share of S."""
        return AlphaBetaGammaCost(self.alpha * count, self.beta * count * fraction, self.gamma * count * fraction)


def one_message(fraction: Fraction | int = 1, reduced_fraction: Fraction | int = 0) -> AlphaBetaGammaCost:
    """One message with a share of S, of which a share is added up where it arrives."""
    return AlphaBetaGammaCost(1, Fraction(fraction), Fraction(reduced_fraction))


Build = Callable[..., Program]
Cost = Callable[..., AlphaBetaGammaCost]
RankCountCheck = Callable[[int], bool]


@dataclass(frozen=True)
class Algorithm:
    """One way of doing a collective."""

    collective: str
    name: str
    build: Build
    cost: Cost  # The closed form on a network where every rank has one full-duplex port
    supports: RankCountCheck
    options: tuple[str, ...]
    same_bits: bool  # Every rank adds in the same order

    @property
    def axes(self) -> tuple[int, ...]:
        """How many dimensions it can have, if it has dimensions."""
        if "dims" not in self.options:
            return ()
        return (int(self.name[-2]),) if self.name.endswith("d") else tuple(range(1, MAX_AXES + 1))

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.build) or "").split("\n\n")[0].replace("\n", " ")

    def check_ranks(self, ranks: int) -> None:
        """Raise, with the counts that it can take, if it cannot take so many ranks."""
        if not _is_integer(ranks):
            raise InputError(f"ranks: {ranks!r} is no whole number; give 2 or more")
        if ranks < 2:
            raise InputError(f"{ranks} ranks: {self.collective}/{self.name} needs at least 2")
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
    """Put a function in the table."""

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
    by_name = _algorithms_of(collective)
    if not isinstance(name, str) or name not in by_name:
        raise InputError(
            f"{collective} has no algorithm {name!r}; it has {_comma_separated(by_name)}{_nearest_name_hint(name, by_name)}"
        )
    return by_name[name]


def build(collective: str, algorithm: str, ranks: int, **options: object) -> Program:
    """The Program of an algorithm for so many ranks. Options such as `root`, `pieces`, `hosts` or `dims` are the
    algorithm's own."""
    entry = find_algorithm(collective, algorithm)
    entry.check_ranks(ranks)
    return entry.build(ranks, **_check_options(entry, options))


def closed_form(collective: str, algorithm: str, ranks: int, **options: object) -> AlphaBetaGammaCost:
    """What the algorithm costs on a uniform network."""
    entry = find_algorithm(collective, algorithm)
    entry.check_ranks(ranks)
    checked = _check_options(entry, options)
    cost_parameters = inspect.signature(entry.cost).parameters
    return entry.cost(ranks, **{name: value for name, value in checked.items() if name in cost_parameters})


def _check_options(entry: Algorithm, options: dict[str, object]) -> dict[str, object]:
    for name in options:
        if name not in entry.options:
            has = f"has the options {_comma_separated(entry.options)}" if entry.options else "has no options"
            raise InputError(f"{entry.collective}/{entry.name} has no option {name!r}; it {has}")
        _check_option_value(name, options[name])
    return {name: value for name, value in options.items() if value is not None}


def _check_option_value(name: str, value: object) -> None:
    """Options of these names are whole numbers, and `dims` several; others are their algorithm's own business."""
    if value is None:
        return
    if name == "dims" and not (isinstance(value, list | tuple) and value and all(map(_is_integer, value))):
        raise InputError(f"dims: {value!r} are no whole numbers; give them as in dims=(4, 4)")
    if name in ("root", "pieces", "hosts", "src", "dst") and not _is_integer(value):
        raise InputError(f"{name}: {value!r} is no whole number; give one, as in {name}=1")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _algorithms_of(collective: str) -> dict[str, Algorithm]:
    if not isinstance(collective, str) or collective not in _ALGORITHMS:
        raise InputError(
            f"there is no collective {collective!r}; there are {_comma_separated(_ALGORITHMS)}{_nearest_name_hint(collective, _ALGORITHMS)}"
        )
    return _ALGORITHMS[collective]


def _comma_separated(names: object) -> str:
    assert isinstance(names, dict | tuple)
    return ", ".join(names)


# A Program has both ends in it: what other libraries call so is the other rank's half.
_COUNTERPART_NAMES = {"receive": "send", "recv": "send", "wait": "signal"}


def nearest_collective_hint(collective: str) -> str:
    """The name of a collective that may be meant, as ` (nearest: NAME)`; nothing if none is near."""
    return _nearest_name_hint(collective, _ALGORITHMS)


def _nearest_name_hint(name: object, names: Iterable[str]) -> str:
    plain = str(name).lower().replace("_", "-")
    close = [_COUNTERPART_NAMES[plain]] if plain in _COUNTERPART_NAMES else difflib.get_close_matches(plain, names, n=1)
    return f" (nearest: {close[0]})" if close else ""
