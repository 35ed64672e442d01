"""The saved tensors of a block that lie on the host from forward to backward, without torch.

`motet.memory.tiers.offloaded_activations` sends them: all storages of a block that are large enough, but no tensor that
others hold anyway, such as the input that a stage of a pipeline has received.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.memory.policy_choice import MIN_SENT_BYTES
from motet.models.spec.layer_specs import MicroBatchShape, SavedActivation, SavedAttentionMatrix


def sent_sizes(
    tensors: Sequence[SavedActivation | SavedAttentionMatrix], shape: MicroBatchShape, dtype: str, *, received: int = 0
) -> list[int]:
    """The bytes that travel of each tensor that a block saves; `received` are those of an input that others hold."""
    sizes = [tensor.bytes(shape, dtype) for tensor in tensors]
    held = sizes.index(received) if received in sizes else None
    return [size * (size >= MIN_SENT_BYTES and i != held) for i, size in enumerate(sizes)]


@dataclass(frozen=True)
class HostActivations:
    """The activations of a rank on its host: the most bytes in a moment, and the bytes that travel in a step."""

    peak_bytes: int = 0
    to_host: int = 0
    to_device: int = 0

    def times(self, microbatches: int, shown: int) -> "HostActivations":
        """The traffic of more micro-batches than the shown ones, which are alike."""
        return HostActivations(
            self.peak_bytes, self.to_host * microbatches // shown, self.to_device * microbatches // shown
        )
