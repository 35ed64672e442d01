"""Tokenizers: trained, given and bytes; what they say about themselves, and what is refused."""

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from corpora import SMALL
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from motet.data.corpus.tokenizer import Tokenizer, bpe_vocab_size, load_tokenizer, train_bpe
from refusals import refused

BYTES = load_tokenizer("bytes")


@cache
def trained(size: int, sentinels: int = 0) -> Tokenizer:
    return train_bpe([SMALL.read_text(encoding="utf-8")], size, sentinels)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return trained(400)


def words(path: Path, *special: str) -> Path:
    """A tokenizer.json of whole words, as others make them, with the given tokens beside."""
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    inner.enable_truncation(2)
    inner.enable_padding(length=2)
    inner.save(str(path))
    return path


@given(st.text())
def test_bytes_are_their_own_tokens(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode("utf-8", "surrogatepass"))
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.text())
def test_bpe_gives_the_text_back(text: str) -> None:
    tokenizer = trained(400)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_is_deterministic_and_keeps_to_its_size(bpe: Tokenizer) -> None:
    again = trained.__wrapped__(400)
    assert again.backend.to_str() == bpe.backend.to_str() and again.fingerprint == bpe.fingerprint
    assert bpe.vocab_size == 400 and trained(300).fingerprint != bpe.fingerprint


def test_a_small_text_gives_fewer_tokens_than_asked(bpe: Tokenizer) -> None:
    assert 400 < trained(100_000).vocab_size < 2000


def test_merges_shorten_the_text(bpe: Tokenizer) -> None:
    text = SMALL.read_text()
    assert len(bpe.encode(text)) < 0.6 * len(text)


@pytest.mark.parametrize("spec", ["bytes", "bpe"])
def test_special_tokens_are_never_made_from_text(spec: str, bpe: Tokenizer) -> None:
    tokenizer = BYTES if spec == "bytes" else bpe
    special = {tokenizer.end_id, tokenizer.mask_id, tokenizer.pad_id}
    assert len(special) == 3 and not special & set(tokenizer.encode("a<|end|>b<|mask|>"))
    assert tokenizer.decode([tokenizer.end_id]) == "<|end|>"


def test_vocabularies_of_bytes() -> None:
    assert (BYTES.vocab_size, BYTES.end_id, BYTES.mask_id, BYTES.pad_id) == (259, 256, 257, 258)
    assert load_tokenizer("bytes", 100).sentinel_ids == tuple(range(259, 359))


def test_sentinels_are_reserved_within_the_size() -> None:
    tokenizer = trained(400, sentinels=100)
    assert tokenizer.vocab_size == 400 and len(tokenizer.sentinel_ids) == 100


def test_a_saved_tokenizer_is_the_same(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(str(spec))
        assert again.fingerprint == bpe.fingerprint and again.encode("a<|end|>") == bpe.encode("a<|end|>")


def test_encode_batch_is_encode(bpe: Tokenizer) -> None:
    texts = SMALL.read_text().splitlines()
    assert bpe.encode_batch(texts) == [bpe.encode(text) for text in texts]


def test_a_given_tokenizer_does_not_cut_or_fill_up(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(words(tmp_path / "mine.json", "</s>")))
    assert tokenizer.encode("a b a b") == [1, 2, 1, 2] and tokenizer.encode("a") == [1]
    assert (tokenizer.end_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.vocab_size) == (3, 3, None, 4)


def test_a_config_beside_it_names_the_special_tokens(tmp_path: Path) -> None:
    words(tmp_path / "tokenizer.json", "</s>", "<stop>", "<hole>", "<fill>")
    config = {"eos_token": {"content": "<stop>"}, "mask_token": "<hole>", "pad_token": "<fill>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.end_id, tokenizer.mask_id, tokenizer.pad_id) == (4, 5, 6)


def test_what_a_template_puts_first(tmp_path: Path) -> None:
    path = words(tmp_path / "t.json", "<s>", "</s>")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)])
    inner.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.begin_ids == [3] and tokenizer.encode("a b") == [1, 2] and BYTES.begin_ids == []


def test_refused_files(tmp_path: Path) -> None:
    def refuse(path: Path, message: str) -> None:
        refused(message, load_tokenizer, str(path))

    refuse(tmp_path / "nothing", r"there is no .*nothing; give bpe:SIZE")
    (tmp_path / "tokenizer.json").write_text("{}")
    refuse(tmp_path, r"tokenizer\.json is not a tokenizer\.json")
    refuse(words(tmp_path / "t.json"), r"has no end-of-document token \(tried <\|end\|>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuse(tmp_path / "t.json", r"tokenizer_config\.json is not valid JSON")
    record = json.loads((tmp_path / "t.json").read_text())
    record["model"]["vocab"]["far"] = 1 << 30  # The library would reserve memory for every id below it
    (tmp_path / "far.json").write_text(json.dumps(record))
    merges = {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    (tmp_path / "random.json").write_text(json.dumps({**record, "model": merges}))
    refuse(tmp_path / "random.json", r"random\.json leaves merges out at random \(model\.dropout = 0\.5\)")
    refuse(tmp_path / "far.json", r"far\.json has a token of id 1073741824, above the limit 16777215")


def test_sizes() -> None:
    for spec, sentinels, least in (("bpe:258", 0, 259), ("bpe:300", 100, 359), ("bpe:x", 0, 259), ("bpe:-5", 0, 259)):
        refused(rf"'{spec}': SIZE is not a number from {least} ", bpe_vocab_size, spec, sentinels)
    assert bpe_vocab_size("bpe:259", 0) == 259 and bpe_vocab_size("bytes", 0) is None
    assert bpe_vocab_size("path/to/tokenizer.json", 0) is None
