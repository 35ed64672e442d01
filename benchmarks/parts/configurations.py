"""The ways in which a model is trained between hosts, each as settings, which benchmarks/hosts_training.py compares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from parts.contenders import loss_sum, make_module
from torch import Tensor, nn

import motet
from motet.core import trace
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.train.engine import TrainingEngine

RING = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
BACKEND = dict.fromkeys(RING, "backend")
OPTIMIZER = {"learning_rate": 1e-3, "clip_norm": 1.0}
EVERY = 10


@dataclass(frozen=True)
class TrainingConfiguration:
    """A way to train. Sums and gathers go around rings unless its settings name another algorithm."""

    name: str
    layout: str = ""
    communication: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    """The configuration that computes the same without the codec, whose work runs during backward."""
    exact: bool = True
    """It trains like the ring, up to the order of additions."""

    @property
    def period(self) -> int:
        """Steps after which everything was done once."""
        return int(self.outer.get("every", 1))

    @property
    def settings(self) -> CommunicationSettings:
        return CommunicationSettings(**(RING | dict(self.communication)))

    def silent(self) -> "TrainingConfiguration":
        """The same way on a backend that sends nothing, and knows no algorithms."""
        return replace(self, communication=dict(self.communication) | BACKEND)

    def engine(self) -> TrainingEngine:
        """The engine over the ranks of the default group."""
        outer = {"outer": dict(self.outer)} if self.outer else {}
        return motet.parallelize(
            make_module(),
            self.layout,
            loss=_loss,
            optimizer=OPTIMIZER,
            communication=self.settings,
            **outer,  # type: ignore[arg-type]
        )


CONFIGURATIONS = (
    TrainingConfiguration("flat ring"),
    TrainingConfiguration("hierarchical all-reduce", communication={"all_reduce": "hierarchical"}),
    TrainingConfiguration("hybrid, stage 2 in a host", "zero=2 shard_group=2"),
    TrainingConfiguration("hybrid, stage 3 in a host", "zero=3 shard_group=2"),
    TrainingConfiguration(
        "ZeRO++, int8 and int4",
        "zero=3 secondary_group=2",
        {"compress_parameters": "int8", "compress_gradients": "int4"},
        exact=False,
    ),
    TrainingConfiguration(
        "PowerSGD, rank 4", communication={"compress_gradients": "powersgd:rank=4"}, base="flat ring", exact=False
    ),
    TrainingConfiguration(f"DiLoCo, every {EVERY} steps", outer={"every": EVERY, "momentum": 0.5}, exact=False),
)


def _loss(module: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    with trace.span("forward"):
        return loss_sum(module, tokens)


class SpanTimes:
    """A sink that adds up the times of forwards and backwards."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        if action in self.seconds:
            self.seconds[action] += duration_s

    def on_count(self, name: str, value: float) -> None:
        """Ignore counters."""


Batches = Callable[[int], Tensor]


def batches(rank: int, length: int) -> Batches:
    """This rank's row of each step: a few, again and again, so that the loss must fall."""
    made = torch.randint(0, 4096, (4, 64, 1, length + 1), generator=torch.Generator().manual_seed(7))
    return lambda step: made[step % 4, rank]
