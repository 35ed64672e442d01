"""Globs of names, such as `*.up_proj`, which must match something."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from motet.core.errors import InputError


def names_matching(patterns: Iterable[str], names: Iterable[str], problem: str) -> list[str]:
    """The names that a pattern matches. Refuse a pattern that matches none, which stands for `{!r}` in `problem`."""
    names, patterns = list(names), list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            hint = f"the nearest names are {', '.join(near)}" if near else "the model has none"
            raise InputError(f"{problem.format(pattern)}; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
