"""A job's data, ready to be read: where each corpus lies and which tokenizer belongs to it."""

from dataclasses import dataclass
from typing import Literal

CorpusKind = Literal["built", "megatron", "synthetic"]


@dataclass(frozen=True)
class PreparedCorpus:
    """One corpus of the mixture."""

    kind: CorpusKind
    location: str  # A built folder, a Megatron prefix, or `synthetic:RULE`
    weight: float
    corpus_hash: str  # Of the documents' contents (of index and ends for Megatron)
    documents: int
    tokens: int


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` hands to the loader, to be sent to any process of the same machine."""

    corpora: tuple[PreparedCorpus, ...]
    tokenizer: str  # `bytes`, or a folder with tokenizer.json
    sentinels: int
    vocab_size: int
    classes: int  # The largest label and one; 0 without labels
    train_samples: int  # Samples of one epoch
