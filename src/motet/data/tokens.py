"""Text to tokens and back: one class around the `tokenizers` library for trained, given and plain byte tokenizers.

Besides text there are a few special tokens: the end of a document (also its pad token where there is no other), the
mask of masked-token training, and the sentinels that stand for cut-out spans.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from motet.core.errors import InputError

END, MASK, PAD = "<|end|>", "<|mask|>", "<|pad|>"
SENTINELS = 100
"""Sentinels that our own tokenizers reserve for the objective `spans`; other objectives need none."""

# What others call these tokens, for files that do not say so beside themselves.
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
_MASKS = (MASK, "[MASK]", "<mask>")
_PADS = (PAD, "[PAD]", "<pad>")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer whose special tokens are known."""

    inner: Any
    end_id: int
    """Ends every document."""
    pad_id: int
    """Fills up rows; never a target."""
    mask_id: int | None
    sentinel_ids: tuple[int, ...]
    plain_bytes: bool = False
    """A token is a byte: encoding then needs no library (measured: 1 MB/s with it)."""

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return int(max(self.inner.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def begin_ids(self) -> list[int]:
        """What the tokenizer's own template puts before a text (Llama's begin-of-text, BERT's [CLS]); often nothing."""
        plain = self.encode("a")
        framed = self.inner.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return list(framed[:start])
        return []

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without begin or end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The same for many texts, on the threads of `tokenizers`."""
        if self.plain_bytes:
            return [list(text.encode()) for text in texts]
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text, with special tokens shown."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the tokens of a text."""
        parts = [self.inner.to_str(), self.end_id, self.pad_id, self.mask_id, self.sentinel_ids]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` and others read."""
        special = {"eos_token": self.end_id, "pad_token": self.pad_id, "mask_token": self.mask_id}
        named = {name: self.inner.id_to_token(at) for name, at in special.items() if at is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
        (folder / "tokenizer.json").write_text(self.inner.to_str(pretty=True) + "\n", encoding="utf-8")


def load_tokenizer(spec: str, sentinels: int = 0) -> Tokenizer:
    """The tokenizer `bytes` (with so many sentinels), or that of a tokenizer.json or its folder."""
    if spec == "bytes":
        return replace(special_tokens(_bytes(sentinels), {}, spec), plain_bytes=True)
    given = Path(spec).expanduser()
    path = given / "tokenizer.json" if given.is_dir() else given
    if not path.is_file():
        raise InputError(
            f"data.tokenizer = {spec!r}: there is no {path}; give bpe:SIZE, `bytes`, or the path of a tokenizer.json "
            "or its folder"
        )
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise InputError(f"data.tokenizer = {spec!r}: {path} is not a tokenizer.json: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    return special_tokens(inner, _config_beside(path), spec)


def special_tokens(inner: Any, config: dict[str, Any], spec: str) -> Tokenizer:
    """A tokenizer with its special tokens: those of `config` where given, else those with a name that is in use."""
    if MASK in inner.get_vocab() and END in inner.get_vocab():
        # Our own: text that looks like a special token is text. It is no part of tokenizer.json, so it is set anew.
        inner.encode_special_tokens = True
    end = _find(inner, config.get("eos_token"), _ENDS)
    if end is None:
        raise InputError(
            f"data.tokenizer = {spec!r} has no end-of-document token (tried {', '.join(_ENDS)}); name it as "
            "eos_token in a tokenizer_config.json beside it"
        )
    pad = _find(inner, config.get("pad_token"), _PADS)
    sentinels = [inner.token_to_id(f"<|span_{i}|>") for i in range(SENTINELS)]
    sentinels += [inner.token_to_id(f"<extra_id_{i}>") for i in range(SENTINELS)]
    return Tokenizer(
        inner=inner,
        end_id=end,
        pad_id=end if pad is None else pad,
        mask_id=_find(inner, config.get("mask_token"), _MASKS),
        sentinel_ids=tuple(at for at in sentinels if at is not None),
    )


def special_names(sentinels: int) -> list[str]:
    """The special tokens of our own tokenizers, in the order of their ids."""
    return [END, MASK, PAD, *(f"<|span_{i}|>" for i in range(sentinels))]


def _bytes(sentinels: int) -> Any:
    """Every byte is a token whose id is its value; special tokens follow from 256."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special_names(sentinels))
    return inner


def _byte_characters() -> list[str]:
    """What stands for each byte in a byte-level vocabulary: itself where printable, else a character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def _config_beside(path: Path) -> dict[str, Any]:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{config} is not valid JSON: {error}") from None
    return read if isinstance(read, dict) else {}


def _find(inner: Any, named: Any, known: tuple[str, ...]) -> int | None:
    """The id of the token that the config names (a text, or an object with `content`), else of the first known name."""
    name = named.get("content") if isinstance(named, dict) else named
    for candidate in ([name] if isinstance(name, str) else []) + list(known):
        found = inner.token_to_id(candidate)
        if found is not None:
            return int(found)
    return None
