"""The memory of the ranks of a planned step by category, and whether a device has it.

`allocated` is what tensors take at the peak, `reserved` what the allocator holds for them, `outside` what other tools
see of the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from motet.core.units import format_bytes
from motet.plan.memory.memory_constants import MemoryConstants

_STATES = ("parameters", "master parameters", "gradients", "moments")
# Flat and long-lived: the allocator gives them whole blocks, which they fill
_CONTIGUOUS = (*_STATES, "gathered parameters", "flat copies")
# The least share of the gaps between tensors: before an allocator fails it gives back the blocks that hold no tensor.
# Assumed, after 14 published runs of llm-foundry that fit and would not with all gaps.
_KEPT_GAPS = 0.5


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by category."""

    pipeline_rank: int
    bytes: Mapping[str, float]
    constants: MemoryConstants
    communicators: int
    kept_gaps: float = 1.0  # Share of the gaps between tensors that the allocator keeps: all where a device has enough

    @property
    def allocated(self) -> float:
        """Tensors at the peak."""
        return sum(self.bytes.values())

    @property
    def reserved(self) -> float:
        """The memory that the allocator holds: it rounds blocks, and cannot use all gaps."""
        return self.allocated + self.kept_gaps * self._gaps

    @property
    def outside(self) -> float:
        """Reserved memory, the context of the device, and buffers of the collective library."""
        return self.reserved + self._beyond_allocator

    @property
    def state(self) -> float:
        """Bytes that are kept from step to step."""
        return sum(self.bytes.get(name, 0.0) for name in _STATES)

    def on_device(self, usable_bytes: float) -> "RankMemory":
        """The memory on a device whose allocator gives back what it can before it fails."""
        left, gaps = usable_bytes - self.allocated - self._beyond_allocator, self._gaps
        return replace(self, kept_gaps=min(1.0, max(_KEPT_GAPS, left / gaps)) if gaps else 1.0)

    @property
    def _gaps(self) -> float:
        contiguous = sum(self.bytes.get(name, 0.0) for name in _CONTIGUOUS)
        return self.constants.fragmentation * (self.allocated - contiguous)

    @property
    def _beyond_allocator(self) -> float:
        return self.constants.context_bytes + self.communicators * self.constants.communicator_bytes


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one rank of each stage of a pipeline."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The rank with the most; where several fill their devices, the one whose tensors take the most."""
        return max(self.ranks, key=lambda rank: (rank.outside, rank.allocated))

    def on_device(self, usable_bytes: float) -> "PlannedMemory":
        """The memory on devices whose allocators give back what they can before they fail."""
        return PlannedMemory(tuple(rank.on_device(usable_bytes) for rank in self.ranks))


def fits(memory: PlannedMemory, usable_bytes: float) -> str | None:
    """Why a step needs more than a device has, or None."""
    worst = memory.on_device(usable_bytes).worst
    if worst.outside <= usable_bytes * (1 + 1e-12):
        return None
    activations = worst.bytes.get("saved activations", 0.0)
    other = worst.outside - activations - worst.state
    parts = f"activations {format_bytes(activations)} + states {format_bytes(worst.state)}"
    parts += f" + buffers {format_bytes(other)}"
    return f"stage {worst.pipeline_rank}: {parts} > {format_bytes(usable_bytes)}"
