"""motet trains large language models on any number of devices.

Names are loaded on first use, so `import motet` costs nothing and does not load torch.
"""

from importlib import import_module

__version__ = "0.1.0"

# Exported name -> the module that owns it. The list is frozen by tests/laws/exports.txt.
_EXPORTS = {
    "Job": "motet.train.job",
    "load_job": "motet.train.job",
    "run": "motet.train.launch.entry_points",
    "parallelize": "motet.train.custom_loop",
    "Callback": "motet.monitor.sinks",
    "read_steps": "motet.monitor.events",
    "MotetError": "motet.core.errors",
    "verify": "motet.parity.api",
    "open_checkpoint": "motet.checkpoint.reader",
    "checkpoint_dcp_reader": "motet.checkpoint.tools.dcp_reader",
}

# Packages whose names are public, too.
_PUBLIC_PACKAGES = ("collectives",)

__all__ = ["__version__", *_EXPORTS, *_PUBLIC_PACKAGES]


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _PUBLIC_PACKAGES:
        return import_module(f"motet.{name}")
    raise AttributeError(f"module 'motet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
