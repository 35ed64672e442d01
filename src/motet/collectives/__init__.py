"""Collective communication as values that are executed, costed, proven and drawn.

`program(collective, algorithm, ranks)` gives the Program of an algorithm, `algorithms(collective)` the names to choose
from. Names are loaded on first use, and these without torch.
"""

from importlib import import_module

# Exported name -> the module that owns it.
_EXPORTS = {
    "Program": "motet.collectives.program",
    "Transfer": "motet.collectives.program",
    "algorithm": "motet.collectives.algorithms",
    "algorithms": "motet.collectives.algorithms",
    "closed_form": "motet.collectives.algorithms",
    "collectives": "motet.collectives.algorithms",
    "program": "motet.collectives.algorithms",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'motet.collectives' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
