"""Text to tokens and back: one class around the `tokenizers` library for trained, given and plain byte tokenizers."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from motet.core.errors import InputError, check_input
from motet.core.text_files import parse_json
from motet.data.corpus.chat import ChatTokenizer, load_chat_tokenizer
from motet.data.corpus.discover import first_printable_line
from motet.data.settings import NUM_SENTINELS

END_TOKEN, MASK_TOKEN, PAD_TOKEN = "<|end|>", "<|mask|>", "<|pad|>"
MAX_BPE_SIZE = 1 << 24  # The library reserves memory for all of them

# Names of the special tokens in tokenizers that have no tokenizer_config.json.
_KNOWN_END_TOKENS = (END_TOKEN, "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
_KNOWN_MASK_TOKENS = (MASK_TOKEN, "[MASK]", "<mask>")
_KNOWN_PAD_TOKENS = (PAD_TOKEN, "[PAD]", "<pad>")


# Files next to tokenizer.json that decide how transformers loads it and renders conversations.
_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json")
_KEYS_OF_CONFIG = ("model_type", "tokenizer_class")  # The keys that transformers reads of a model's config.json
# Values of tokenizer_config.json that change the text or the tokens of a conversation.
_KEYS_OF_CHATS = ("chat_template", "tokenizer_class", "add_prefix_space", "legacy")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer whose special tokens are known."""

    backend: Any
    end_id: int  # Ends every document
    pad_id: int  # Fills up rows; never a target; the end if there is no other
    mask_id: int | None  # The token of masked-token training
    sentinel_ids: tuple[int, ...]  # Replace spans
    is_byte_level: bool = False  # A token is a byte, so encoding needs no library (measured: 1 MB/s with it)
    name: str = ""  # The value of data.tokenizer, for messages
    folder: Path | None = None  # Where tokenizer.json lies, if it is a file of this name
    companions: dict[str, str] = field(default_factory=dict)  # Files next to it, by name

    @cached_property
    def vocab_size(self) -> int:
        """The largest token id plus 1."""
        return int(max(self.backend.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def begin_ids(self) -> list[int]:
        """Tokens that the tokenizer's template puts before a text, such as BERT's [CLS]; often none."""
        plain, ids = self.encode("a"), self.backend.encode("a", add_special_tokens=True).ids
        starts = (start for start in range(len(ids) - len(plain) + 1) if ids[start : start + len(plain)] == plain)
        return list(ids[: next(starts, 0)])

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without begin or end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The tokens of many texts, on the threads of `tokenizers`."""
        if self.is_byte_level:
            return [list(text.encode()) for text in texts]
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
            raise InputError(f"the tokenizer cannot encode a text: {error}; give another data.tokenizer") from None

    def decode(self, ids: list[int]) -> str:
        """The text, with special tokens shown."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _config(self) -> dict[str, Any]:
        return _parse_config(self.companions.get("tokenizer_config.json", "{}"), "tokenizer_config.json")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.companions.get("chat_template.jinja") or self._config.get("chat_template"))

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The tokenizer as transformers has it, to render and tokenise conversations."""
        check_input(
            self.has_chat_template,
            f"data.tokenizer = {self.name!r} has no chat template, which conversations need; give the folder of a "
            "Hugging Face tokenizer with a chat_template.jinja, or with a chat_template in its tokenizer_config.json",
        )
        check_input(
            self.folder,
            f"data.tokenizer = {self.name!r}: transformers reads conversations with a file named tokenizer.json; "
            "rename it, and give its folder",
        )
        assert self.folder is not None
        return load_chat_tokenizer(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the tokens of a text or a conversation."""
        parts = [self.backend.to_str(), self.end_id, self.pad_id, self.mask_id, self.sentinel_ids]
        if self.has_chat_template:
            values = {k: v for k, v in self._config.items() if k in _KEYS_OF_CHATS or k.endswith("_token")}
            parts += [values, {k: v for k, v in self.companions.items() if k != "tokenizer_config.json"}]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and the files next to it, which `load_tokenizer` and others read."""
        special = {"eos_token": self.end_id, "pad_token": self.pad_id, "mask_token": self.mask_id}
        names = {name: self.backend.id_to_token(token) for name, token in special.items() if token is not None}
        files = self.companions or {"tokenizer_config.json": json.dumps(names, indent=2) + "\n"}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True) + "\n", encoding="utf-8")


def load_tokenizer(spec: str, sentinels: int = 0) -> Tokenizer:
    """The tokenizer `bytes` with this number of sentinels, or that of a tokenizer.json or its folder."""
    if spec == "bytes":
        return replace(resolve_special_tokens(_byte_backend(sentinels), {}, spec), is_byte_level=True, name=spec)
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    remedy = "give bpe:SIZE, `bytes`, or the path of a tokenizer.json or its folder"
    check_input(path.is_file(), f"data.tokenizer = {spec!r}: there is no {path}; {remedy}")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise InputError(
            f"data.tokenizer = {spec!r}: {path} is not a tokenizer.json: {first_printable_line(error)}"
        ) from None
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    check_input(
        largest < MAX_BPE_SIZE,
        f"data.tokenizer = {spec!r}: {path} has a token of id {largest}, above the limit {MAX_BPE_SIZE - 1}; "
        "number its tokens without gaps",
    )
    dropout = getattr(backend.model, "dropout", None)
    check_input(
        not dropout,
        f"data.tokenizer = {spec!r}: {path} leaves merges out at random (model.dropout = {dropout}), so that a text "
        "has other tokens each time; set its model.dropout to null",
    )
    backend.no_truncation()
    backend.no_padding()
    companions = _read_companions(path)
    config = _parse_config(companions.get("tokenizer_config.json", "{}"), str(path.with_name("tokenizer_config.json")))
    folder = path.parent if path.name == "tokenizer.json" else None
    return replace(resolve_special_tokens(backend, config, spec), name=spec, folder=folder, companions=companions)


def resolve_special_tokens(backend: Any, config: dict[str, Any], spec: str) -> Tokenizer:
    """A tokenizer with the special tokens that `config` names, else those with a known name."""
    if MASK_TOKEN in backend.get_vocab() and END_TOKEN in backend.get_vocab():
        # In motet's own tokenizers, text that looks like a special token is text. tokenizer.json does not store this.
        backend.encode_special_tokens = True
    end = _find_token_id(backend, config.get("eos_token"), _KNOWN_END_TOKENS)
    if end is None:
        remedy = "name it as eos_token in a tokenizer_config.json in the same folder"
        tried = ", ".join(_KNOWN_END_TOKENS)
        raise InputError(f"data.tokenizer = {spec!r} has no end-of-document token (tried {tried}); {remedy}")
    pad = _find_token_id(backend, config.get("pad_token"), _KNOWN_PAD_TOKENS)
    names = [form.format(i) for form in ("<|span_{}|>", "<extra_id_{}>") for i in range(NUM_SENTINELS)]
    return Tokenizer(
        backend=backend,
        end_id=end,
        pad_id=end if pad is None else pad,
        mask_id=_find_token_id(backend, config.get("mask_token"), _KNOWN_MASK_TOKENS),
        sentinel_ids=tuple(token for name in names if (token := backend.token_to_id(name)) is not None),
    )


def special_token_names(sentinels: int) -> list[str]:
    """The special tokens of motet's own tokenizers, in the order of their ids."""
    return [END_TOKEN, MASK_TOKEN, PAD_TOKEN, *(f"<|span_{i}|>" for i in range(sentinels))]


def bpe_vocab_size(spec: str, sentinels: int) -> int | None:
    """SIZE of `bpe:SIZE`; None for a tokenizer that is not trained."""
    if not spec.startswith("bpe:"):
        return None
    text, minimum = spec.removeprefix("bpe:"), 256 + len(special_token_names(sentinels))
    size = int(text) if text.isdecimal() and len(text) <= len(str(MAX_BPE_SIZE)) else 0
    limits = f"from {minimum} (256 bytes and {minimum - 256} special tokens) to {MAX_BPE_SIZE}; give one"
    check_input(minimum <= size <= MAX_BPE_SIZE, f"data.tokenizer = {spec!r}: SIZE is not a number {limits}")
    return size


def train_bpe(texts: Iterable[str], size: int, sentinels: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, special ones included; a small corpus may have fewer merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, names = sorted(pre_tokenizers.ByteLevel.alphabet()), special_token_names(sentinels)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer=trainer)
    return replace(resolve_special_tokens(backend, {}, f"bpe:{size}"), name=f"bpe:{size}")


def _byte_backend(sentinels: int) -> Any:
    """Every byte is a token whose id is its value; special tokens follow from 256."""
    # In a byte-level vocabulary a printable byte stands for itself, any other for a character from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    vocabulary = {chr(value if value in printable else next(substitutes)): value for value in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special_token_names(sentinels))
    return backend


def _read_companions(path: Path) -> dict[str, str]:
    texts = {}
    for name in _COMPANION_FILES:
        file = path.with_name(name)
        try:
            if file.is_file():
                texts[name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}; copy it again") from None
    if "config.json" in texts:
        # Only what transformers chooses the class of a tokenizer by: a model's config is no part of a tokenizer.
        values = _parse_config(texts.pop("config.json"), str(path.with_name("config.json")))
        if kept := {key: values[key] for key in _KEYS_OF_CONFIG if isinstance(values.get(key), str)}:
            texts["config.json"] = json.dumps(kept, indent=2) + "\n"
    return texts


def _parse_config(text: str, path: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _find_token_id(backend: Any, configured: Any, known_names: tuple[str, ...]) -> int | None:
    name = configured.get("content") if isinstance(configured, dict) else configured
    # Half of a surrogate pair is valid in JSON, but in no tokenizer.
    names = (*([name.encode(errors="replace").decode()] if isinstance(name, str) else []), *known_names)
    return next((int(token) for token in map(backend.token_to_id, names) if token is not None), None)
