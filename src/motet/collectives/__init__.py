"""Collective communication as values that are executed, costed, proven and drawn.

`build(collective, algorithm, ranks)` makes the Program of an algorithm, and `algorithm_names(collective)` lists the
algorithms. Names are loaded on first use, without torch.
"""

from importlib import import_module

# Exported name -> the module that owns it.
_EXPORTS = dict.fromkeys(("ChunkTransfer", "Program"), "motet.collectives.program") | dict.fromkeys(
    ("algorithm", "algorithm_names", "build", "closed_form", "collective_names"),
    "motet.collectives.algorithms.registry",
)

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'motet.collectives' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
