"""Limits of whole numbers among the options of `motet collectives`, told with the value and what to give."""

from collections.abc import Callable

from motet.core.errors import InputError

MOST_RANKS = 1024
"""The steps of a ring of so many ranks are two million transfers."""


def whole(name: str, least: int, most: int | None = None) -> Callable[[int | None], int | None]:
    """What typer calls with the value of an option."""

    def check(value: int | None) -> int | None:
        if value is not None and not least <= value <= (value if most is None else most):
            raise InputError(f"{name} {value}: give {least} {'or more' if most is None else f'to {most}'}")
        return value

    return check
