"""The only file that reads the environment; everything else is given what it needs as a value."""

import os


def read_environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)
