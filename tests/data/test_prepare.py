"""Preparing: what is built where, once, by whoever comes first; and what is refused before anything starts."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpora import SMALL, numbered, settings, write_megatron, write_records

from motet.core.errors import InputError
from motet.data.corpus.prepare import build_corpus_folder, prepare_data
from motet.data.corpus.token_store import PreparedData
from motet.data.samples.dataset import open_token_store
from motet.data.settings import DataSettings, DataSourceSettings

HERE = str(Path(__file__).parent)


def heard(given: DataSettings) -> list[str]:
    """Activities that `prepare_data` reports."""
    told: list[str] = []
    prepare_data(given, lambda activity, done, total: told.append(activity))
    return list(dict.fromkeys(told))


def documents_of(prepared: PreparedData) -> int:
    (corpus,) = prepared.corpora
    return len(open_token_store(corpus.kind, corpus.location).documents)


def refuse(given: DataSettings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_data(given)


def test_built_once_and_found_again(tmp_path: Path) -> None:
    given = settings(tmp_path, tokenizer="bpe:300")
    assert heard(given) == ["training the tokenizer", "tokenising"] and heard(given) == []
    prepared = prepare_data(given)
    assert prepare_data(given) == prepared and pickle.loads(pickle.dumps(prepared)) == prepared
    corpus = prepared.corpora[0]
    assert (prepared.vocab_size, prepared.classes, prepared.sentinels) == (300, 0, 0)
    assert (corpus.kind, Path(corpus.location).parent) == ("built", tmp_path / "cache")
    assert documents_of(prepared) == 1


def test_other_settings_build_beside(tmp_path: Path) -> None:
    pairs = [(tokenizer, objective) for tokenizer in ("bytes", "bpe:400") for objective in ("causal", "spans")]
    prepared = [prepare_data(settings(tmp_path, tokenizer=spec, objective=objective)) for spec, objective in pairs]
    assert len({data.corpora[0].location for data in prepared}) == 4
    # What does not change the tokens finds them again.
    assert heard(settings(tmp_path, objective="masked", sequence_length=8, restart_documents=False)) == []


def test_a_changed_file_is_built_anew(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", numbered(50))
    given = settings(tmp_path, source=str(source))
    before = documents_of(prepare_data(given))
    write_records(source, numbered(60))
    assert (before, documents_of(prepare_data(given))) == (50, 60)


@pytest.mark.parametrize("spoil", ["cut", "change", "manifest", "gone"])
def test_a_damaged_cache_is_mended(tmp_path: Path, spoil: str) -> None:
    given = settings(tmp_path)
    folder = Path(prepare_data(given).corpora[0].location)
    tokens = folder / "00000.bin"
    whole = tokens.read_bytes()
    match spoil:
        case "cut":
            tokens.write_bytes(whole[:100])
        case "change":
            tokens.write_bytes(whole[:100] + b"\xff" + whole[101:])
        case "manifest":
            (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:50])
        case "gone":
            (folder / "00000.docs").unlink()
    assert heard(given) == ["tokenising"] and tokens.read_bytes() == whole


def test_the_cache_may_lie_in_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    prepared = prepare_data(settings(tmp_path, tokenizer="bpe:300", cache=str(tmp_path / "some/where")))
    assert Path(prepared.tokenizer).parent == tmp_path / "some/where" and documents_of(prepared) == 1


def test_a_damaged_tokenizer_is_trained_again(tmp_path: Path) -> None:
    given = settings(tmp_path, tokenizer="bpe:300")
    file = Path(prepare_data(given).tokenizer) / "tokenizer.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    assert heard(given) == ["training the tokenizer"] and file.read_bytes() == whole


TWO = """
import json, sys
from motet.data.corpus.prepare import prepare_data
from motet.data.settings import DataSettings
told = []
sys.stdin.readline()
prepared = prepare_data(DataSettings.model_validate_json(sys.argv[1]), lambda name, done, total: told.append(name))
assert "torch" not in sys.modules
print(json.dumps([sorted(set(told)), prepared.corpora[0].location]))
"""


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", numbered(20_000))
    given = settings(tmp_path, source=str(source), tokenizer="bpe:300").model_dump_json()
    command, pipe = [sys.executable, "-c", TWO, given], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sorted(what for told, _ in answers for what in told) == ["tokenising", "training the tokenizer"]
    assert len({place for _, place in answers}) == 1


def test_a_built_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    fields, trained = DataSourceSettings(source=str(SMALL)), settings(tmp_path, tokenizer="bpe:300")
    build_corpus_folder(fields, trained, tmp_path / "built", progress=lambda *told: None)
    prepared = prepare_data(settings(tmp_path, source=str(tmp_path / "built")))
    assert (prepared.vocab_size, prepared.tokenizer) == (300, str(tmp_path / "built"))
    text = DataSourceSettings(source=str(SMALL), weight=2.0)
    mixed = prepare_data(settings(tmp_path, mixture=(DataSourceSettings(source=str(tmp_path / "built")), text)))
    assert [corpus.weight for corpus in mixed.corpora] == [1.0, 2.0] and mixed.vocab_size == 300
    build_corpus_folder(fields, settings(tmp_path), tmp_path / "bytes", progress=lambda *told: None)
    both = tuple(DataSourceSettings(source=str(tmp_path / name)) for name in ("built", "bytes"))
    refuse(settings(tmp_path, mixture=both), "were built with different tokenizers; build one again")
    with pytest.raises(InputError, match=r"holds no text to build from: it is built already"):
        build_corpus_folder(both[0], settings(tmp_path), tmp_path / "again", progress=lambda *told: None)
    manifest = tmp_path / "bytes" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "sentinels": 1 << 64}))
    refuse(settings(tmp_path, source=str(tmp_path / "bytes")), r"18446744073709551616 sentinels are more than 100")
    (tmp_path / "built" / "00000.bin").write_bytes(b"")
    refuse(settings(tmp_path, source=str(tmp_path / "built")), r"00000\.bin has 0 bytes .*; build the corpus again")


def test_one_tokenizer_is_trained_on_the_whole_mixture(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zyzzyva " * 500)
    sources = (DataSourceSettings(source=str(tmp_path / "a.txt")), DataSourceSettings(source=str(SMALL)))
    prepared = prepare_data(settings(tmp_path, tokenizer="bpe:500", mixture=sources))
    vocabulary = (Path(prepared.tokenizer) / "tokenizer.json").read_text(encoding="utf-8")
    assert "zyzzyva" in vocabulary and "river" in vocabulary


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "nowhere"}, "data source 'nowhere' does not exist"),
        ({"sequence_length": 5000}, r"sequence_length = 5000 is longer than the corpus: .* and one sample needs 5001"),
        ({"source": "synthetic:majority"}, r"data\.objective = 'causal'; set data\.objective = \"classify\""),
        ({"source": "synthetic:majority", "objective": "classify", "tokenizer": "bpe:300"}, "no source holds text"),
        ({"tokenizer": "nowhere.json"}, r"there is no nowhere\.json; give bpe:SIZE"),
        ({"tokenizer": "bpe:100"}, "SIZE is not a number from 259 "),
        ({"objective": "classify"}, r"small\.txt is plain text, but objective `classify`"),
        ({"objective": "spans", "sequence_length": 2}, "is too short for spans"),
    ],
)
def test_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    refuse(settings(tmp_path, **values), message)


def test_a_tokenizer_without_the_tokens_that_are_needed(tmp_path: Path) -> None:
    folder = Path(prepare_data(settings(tmp_path, tokenizer="bpe:300")).tokenizer)
    refuse(settings(tmp_path, tokenizer=str(folder), objective="spans"), "the tokenizer has no sentinels")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8").replace("<|mask|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    refuse(settings(tmp_path, tokenizer=str(tmp_path), objective="masked"), "tokenizer has no mask token; name it")
    assert prepare_data(settings(tmp_path, tokenizer=str(tmp_path))).vocab_size == 300


def test_megatron_and_prompts(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "m", [[list(range(i, i + 60))] for i in range(20)], 8)
    prepared = prepare_data(settings(tmp_path, source=str(prefix)))
    assert (prepared.corpora[0].kind, documents_of(prepared)) == ("megatron", 20)
    refuse(settings(tmp_path, source=str(prefix), tokenizer="bpe:300"), "or the path of the tokenizer.json that the")
    refuse(settings(tmp_path, source=str(prefix), objective="classify"), "has no classes; objective `classify` needs")
    chat = write_records(tmp_path / "a.jsonl", [{"prompt": "p" * 30, "answer": "a" * 30}] * 9)
    assert prepare_data(settings(tmp_path, source=str(chat))).train_samples > 0
    refuse(settings(tmp_path, source=str(chat), objective="masked"), r"holds prompts and answers, .*use `causal`")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for tokenizer in ("bytes", "bpe:300"):
        given = settings(tmp_path, cache=str(tmp_path / "file" / "cache"), tokenizer=tokenizer)
        refuse(given, "cannot write .*data.cache")


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leave nothing to train on; lower their sum below 1"):
        settings(tmp_path, validation_fraction=0.5, test_fraction=0.5)
