"""The only file that reads and changes the environment; others take what they need as an argument.

The backend `motet` reads its run token itself, because torch starts it.
"""

import os
from collections.abc import Mapping


def read_environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)


def set_environment_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, and of the processes that it starts."""
    os.environ.update(variables)
