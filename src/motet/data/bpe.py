"""Training a byte-level BPE on a corpus: the same corpus and size always give the same tokenizer."""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from motet.core.errors import InputError
from motet.data.corpus import Corpus
from motet.data.documents import read_documents
from motet.data.settings import SourceSettings
from motet.data.tokens import Tokenizer, special_names, special_tokens

Text = tuple[Corpus, SourceSettings, bool]
"""A corpus, the names of its fields, and whether its records have labels."""

TRAINED_ON = 64 << 20
"""Bytes of text that are looked at, evenly spread over a larger corpus; more hardly changes the merges."""


def trained_size(spec: str, sentinels: int) -> int | None:
    """SIZE of `bpe:SIZE`; None for a tokenizer that is not trained."""
    if not spec.startswith("bpe:"):
        return None
    size = spec.removeprefix("bpe:")
    least = 256 + len(special_names(sentinels))
    if not size.isdecimal() or int(size) < least:
        raise InputError(
            f"data.tokenizer = {spec!r}: SIZE must be a number of at least {least} "
            f"(256 bytes and {least - 256} special tokens)"
        )
    return int(size)


def train_bpe(corpora: list[Text], size: int, sentinels: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, special ones included; a small corpus may have fewer merges."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special_names(sentinels),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_texts(corpora), trainer=trainer)
    return special_tokens(inner, {}, f"bpe:{size}")


def _texts(corpora: list[Text]) -> Iterator[str]:
    for corpus, fields, labelled in corpora:
        every = -(-corpus.size // TRAINED_ON)
        for piece in corpus.pieces[::every]:
            for document in read_documents(piece, fields, labelled):
                yield from (document.prompt or "", document.text)
