"""Limits of whole numbers among the options of `motet collectives`, told with the value and what to give."""

from collections.abc import Callable

from motet.core.errors import InputError

MAX_RANKS = 1024  # The steps of a ring of so many ranks are two million transfers


def integer_option(name: str, minimum: int, maximum: int | None = None) -> Callable[[int | None], int | None]:
    """What typer calls with the value of an option."""

    def check(value: int | None) -> int | None:
        if value is not None and not minimum <= value <= (value if maximum is None else maximum):
            raise InputError(f"{name} {value}: give {minimum} {'or more' if maximum is None else f'to {maximum}'}")
        return value

    return check
