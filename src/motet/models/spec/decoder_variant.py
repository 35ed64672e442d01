"""Parts of published decoders that motet's own decoder does not have. They are known for planning alone."""

from dataclasses import dataclass
from typing import Literal

from motet.models.settings import DecoderSettings


@dataclass(frozen=True)
class DecoderVariant:
    """The differences of a published decoder from motet's."""

    # Before attention and feed-forward network, after them, both, or one that both of them read
    norms: Literal["before", "after", "both", "shared"] = "before"
    embedding_norm: bool = False
    more_positions: int = 0  # Rows of the table of positions beyond the context
    query_key_norm_of_all_heads: bool = False
    attention_sinks: bool = False  # A learned score for each head that takes part in the softmax
    expert_biases: bool = False
    full_layers: tuple[int, ...] = ()  # Layers without the window that the others have


class PublishedDecoderSettings(DecoderSettings):
    """A decoder as its publisher configures it. It is trained as a module of transformers."""

    variant: DecoderVariant = DecoderVariant()


def variant_of(settings: DecoderSettings) -> DecoderVariant:
    """The variant of a decoder."""
    return settings.variant if isinstance(settings, PublishedDecoderSettings) else DecoderVariant()
