"""One measurement of the machine for all runs of a process of tests: it takes a second, and with float16 many."""

from functools import cache
from types import ModuleType

import torch


def measure_once(module: ModuleType) -> None:
    """Have a module measure with the same arguments once. Random numbers stay those of a run that measures nothing."""
    for name in ("measure_rates", "measure_host"):
        measure = torch.random.fork_rng(devices=[])(getattr(module, name))
        setattr(module, name, cache(measure))
