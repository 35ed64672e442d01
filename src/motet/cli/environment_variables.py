"""The only file that reads the environment; others take what they need as an argument."""

import os


def read_environment() -> dict[str, str]:
    """A copy of the environment of this process."""
    return dict(os.environ)
