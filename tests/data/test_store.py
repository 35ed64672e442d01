"""The folder of a built corpus: what it says, and how damage to it is told."""

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import SMALL
from test_build import build

from motet.data.corpus.token_store import (
    DOCUMENT_DTYPE,
    delete_corpus_files,
    find_damage,
    is_built_corpus,
    open_built_corpus,
    read_corpus_manifest,
    write_json_atomically,
)
from refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(SMALL, tmp_path / "out")
    return tmp_path / "out"


def damage(folder: Path) -> str:
    return str(find_damage(folder, read_corpus_manifest(folder), checksums=True)).replace(f"{folder}/", "")


def test_damage_of_every_kind(folder: Path) -> None:
    tokens, table = folder / "00000.bin", folder / "00000.docs"
    whole = tokens.read_bytes()
    assert damage(folder) == "None"
    tokens.write_bytes(whole[:-1])
    assert damage(folder) == f"00000.bin has {len(whole) - 1} bytes where the manifest says {len(whole)}"
    refused(r"00000\.bin has .* bytes where the manifest says .*; build the corpus again", open_built_corpus, folder)
    tokens.write_bytes(b"x" + whole[1:])
    assert damage(folder) == "the content of 00000.bin or its .docs has changed"
    assert find_damage(folder, read_corpus_manifest(folder), checksums=False) is None
    tokens.write_bytes(whole)
    table.unlink()
    assert damage(folder) == "00000.docs is missing"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "other"}, r"holds no corpus built by `motet data build` \(no manifest\.json"),
        ({"version": 7}, "is of format version 7, this motet reads 2; build it again"),
        ({"shards": [{"tokens": 1}]}, r"manifest\.json is damaged"),
        ({"tokens": None}, r"manifest\.json is damaged \(tokens: Field required\)"),
    ],
)
def test_manifests_that_cannot_be_read(folder: Path, values: dict[str, object], message: str) -> None:
    manifest = {**json.loads((folder / "manifest.json").read_text()), **values}
    known = {key: value for key, value in manifest.items() if value is not None}
    write_json_atomically(folder / "manifest.json", known)
    refused(message, read_corpus_manifest, folder)
    (folder / "manifest.json").write_text("[1")
    assert not is_built_corpus(folder)
    refused(r"holds no corpus built by `motet data build` \(no manifest\.json", read_corpus_manifest, folder)


def test_clear_deletes_what_is_ours_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "model.bin").write_text("mine")
    delete_corpus_files(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model.bin", "notes.txt"]


def test_reading_across_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.data.corpus.discover._MIN_RANGE_BYTES", 10)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 8)
    build(tmp_path, tmp_path / "out")
    store = open_built_corpus(tmp_path / "out")
    assert len(store.files) == 3
    everything = [*b"a" * 8, 256, *b"b" * 8, 256, *b"c" * 8, 256]
    assert store.read(0, 27).tolist() == everything and store.read(7, 12).tolist() == everything[7:19]
    assert store.first_token.tolist() == [0, 9, 18, 27]


def test_documents_that_do_not_fit_the_tokens_of_a_shard_are_refused(folder: Path) -> None:
    table = np.fromfile(folder / "00000.docs", DOCUMENT_DTYPE)
    for field, value in (("length", 1 << 40), ("length", 0), ("skip", 1 << 31), ("label", 1 << 20)):
        forged = table.copy()
        forged[field][0] = value
        forged.tofile(folder / "00000.docs")
        refused(r"00000\.docs does not describe the \d+ tokens of its shard", open_built_corpus, folder)
