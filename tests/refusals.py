"""A check that bad input is refused with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest

from motet.core.errors import InputError


def refused(sentence: str, call: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    """Check that the call raises an InputError whose message the pattern matches."""
    with pytest.raises(InputError, match=sentence):
        call(*arguments, **settings)
