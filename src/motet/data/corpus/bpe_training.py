"""Training a byte-level BPE on a corpus: the same corpus and size always give the same tokenizer."""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from motet.core.errors import InputError
from motet.data.corpus.discover import CorpusFiles
from motet.data.corpus.document_reader import read_documents
from motet.data.corpus.tokenizer import Tokenizer, resolve_special_tokens, special_token_names
from motet.data.settings import DataSourceSettings

# A corpus, the names of its fields, and whether its records have labels.
TrainingText = tuple[CorpusFiles, DataSourceSettings, bool]

# Bytes of text used, evenly distributed over a larger corpus; more hardly changes the merges.
MAX_TRAINING_BYTES = 64 << 20


def bpe_vocab_size(spec: str, sentinels: int) -> int | None:
    """SIZE of `bpe:SIZE`; None for a tokenizer that is not trained."""
    if not spec.startswith("bpe:"):
        return None
    size, minimum = spec.removeprefix("bpe:"), 256 + len(special_token_names(sentinels))
    if not size.isdecimal() or int(size) < minimum:
        raise InputError(
            f"data.tokenizer = {spec!r}: SIZE must be a number of at least {minimum} "
            f"(256 bytes and {minimum - 256} special tokens)"
        )
    return int(size)


def train_bpe(corpora: list[TrainingText], size: int, sentinels: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, special ones included; a small corpus may have fewer merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special_token_names(sentinels),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(corpora), trainer=trainer)
    return resolve_special_tokens(backend, {}, f"bpe:{size}")


def _texts(corpora: list[TrainingText]) -> Iterator[str]:
    for corpus, fields, has_labels in corpora:
        for file_range in corpus.file_ranges[:: -(-corpus.size // MAX_TRAINING_BYTES)]:
            for document in read_documents(file_range, fields, has_labels):
                yield from (document.prompt or "", document.text)
