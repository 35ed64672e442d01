"""The fixture of Triton's interpreter."""

from triton_interpreter import interpreted

__all__ = ["interpreted"]
