"""Parts of published decoders that motet's own decoder does not have. They are known for planning alone."""

from typing import Annotated, Literal

from pydantic import Field

from motet.core.base_settings import FrozenSettings
from motet.models.settings import DecoderSettings


class DecoderVariant(FrozenSettings):
    """The differences of a published decoder from motet's."""

    norms: Literal["before", "after", "both", "shared"] = "before"
    """Norms before attention and feed-forward network, after them, both, or one before both of them."""
    embedding_norm: bool = False
    more_positions: Annotated[int, Field(ge=0)] = 0
    """Rows of the table of positions beyond the context."""
    query_key_norm_of_all_heads: bool = False
    attention_sinks: bool = False
    """A learned score for each head that takes part in the softmax."""
    expert_biases: bool = False
    full_layers: tuple[int, ...] = ()
    """Layers without the window that the others have."""


class PublishedDecoderSettings(DecoderSettings):
    """A decoder as its publisher configures it. It is trained as a module of transformers."""

    variant: DecoderVariant = DecoderVariant()


def variant_of(settings: DecoderSettings) -> DecoderVariant:
    """The variant of a decoder."""
    return settings.variant if isinstance(settings, PublishedDecoderSettings) else DecoderVariant()
