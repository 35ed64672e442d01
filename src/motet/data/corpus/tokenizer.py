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

END_TOKEN, MASK_TOKEN, PAD_TOKEN = "<|end|>", "<|mask|>", "<|pad|>"
NUM_SENTINELS = 100  # Sentinels that our own tokenizers reserve for the objective `spans`; other objectives need none

# What others call these tokens, for files that do not say so beside themselves.
_KNOWN_END_TOKENS = (END_TOKEN, "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
_KNOWN_MASK_TOKENS = (MASK_TOKEN, "[MASK]", "<mask>")
_KNOWN_PAD_TOKENS = (PAD_TOKEN, "[PAD]", "<pad>")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer whose special tokens are known."""

    backend: Any
    end_id: int  # Ends every document
    pad_id: int  # Fills up rows; never a target
    mask_id: int | None
    sentinel_ids: tuple[int, ...]
    is_byte_level: bool = False  # A token is a byte: encoding then needs no library (measured: 1 MB/s with it)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def begin_ids(self) -> list[int]:
        """What the tokenizer's own template puts before a text (Llama's begin-of-text, BERT's [CLS]); often nothing."""
        plain = self.encode("a")
        with_template = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(with_template) - len(plain) + 1):
            if with_template[start : start + len(plain)] == plain:
                return list(with_template[:start])
        return []

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without begin or end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The same for many texts, on the threads of `tokenizers`."""
        if self.is_byte_level:
            return [list(text.encode()) for text in texts]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text, with special tokens shown."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the tokens of a text."""
        parts = [self.backend.to_str(), self.end_id, self.pad_id, self.mask_id, self.sentinel_ids]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` and others read."""
        special = {"eos_token": self.end_id, "pad_token": self.pad_id, "mask_token": self.mask_id}
        named = {name: self.backend.id_to_token(at) for name, at in special.items() if at is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True) + "\n", encoding="utf-8")


def load_tokenizer(spec: str, sentinels: int = 0) -> Tokenizer:
    """The tokenizer `bytes` (with so many sentinels), or that of a tokenizer.json or its folder."""
    if spec == "bytes":
        return replace(resolve_special_tokens(_byte_backend(sentinels), {}, spec), is_byte_level=True)
    tokenizer_path = Path(spec).expanduser()
    path = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    if not path.is_file():
        raise InputError(
            f"data.tokenizer = {spec!r}: there is no {path}; give bpe:SIZE, `bytes`, or the path of a tokenizer.json "
            "or its folder"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise InputError(f"data.tokenizer = {spec!r}: {path} is not a tokenizer.json: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return resolve_special_tokens(backend, _read_tokenizer_config(path), spec)


def resolve_special_tokens(backend: Any, config: dict[str, Any], spec: str) -> Tokenizer:
    """A tokenizer with its special tokens: those of `config` where given, else those with a name that is in use."""
    if MASK_TOKEN in backend.get_vocab() and END_TOKEN in backend.get_vocab():
        # Our own: text that looks like a special token is text. It is no part of tokenizer.json, so it is set anew.
        backend.encode_special_tokens = True
    end = _find_token_id(backend, config.get("eos_token"), _KNOWN_END_TOKENS)
    if end is None:
        raise InputError(
            f"data.tokenizer = {spec!r} has no end-of-document token (tried {', '.join(_KNOWN_END_TOKENS)}); name it as "
            "eos_token in a tokenizer_config.json beside it"
        )
    pad = _find_token_id(backend, config.get("pad_token"), _KNOWN_PAD_TOKENS)
    sentinels = [backend.token_to_id(f"<|span_{i}|>") for i in range(NUM_SENTINELS)]
    sentinels += [backend.token_to_id(f"<extra_id_{i}>") for i in range(NUM_SENTINELS)]
    return Tokenizer(
        backend=backend,
        end_id=end,
        pad_id=end if pad is None else pad,
        mask_id=_find_token_id(backend, config.get("mask_token"), _KNOWN_MASK_TOKENS),
        sentinel_ids=tuple(at for at in sentinels if at is not None),
    )


def special_token_names(sentinels: int) -> list[str]:
    """The special tokens of our own tokenizers, in the order of their ids."""
    return [END_TOKEN, MASK_TOKEN, PAD_TOKEN, *(f"<|span_{i}|>" for i in range(sentinels))]


def _byte_backend(sentinels: int) -> Any:
    """Every byte is a token whose id is its value; special tokens follow from 256."""
    vocabulary = {character: value for value, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special_token_names(sentinels))
    return backend


def _byte_characters() -> list[str]:
    """What stands for each byte in a byte-level vocabulary: itself where printable, else a character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused_codepoints = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(unused_codepoints)) for value in range(256)]


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{config} is not valid JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _find_token_id(backend: Any, configured: Any, known_names: tuple[str, ...]) -> int | None:
    """The id of the token that the config names (a text, or an object with `content`), else of the first known name."""
    name = configured.get("content") if isinstance(configured, dict) else configured
    for candidate in ([name] if isinstance(name, str) else []) + list(known_names):
        token_id = backend.token_to_id(candidate)
        if token_id is not None:
            return int(token_id)
    return None
