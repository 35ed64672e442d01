"""The start of a kernel in Triton."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on a grid of programs."""
    kernel[grid](*arguments, **constants)
