"""Building: the same bytes however many workers there are and however often it was broken off."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from corpora import SMALL, numbered, write_records

from motet.core.errors import MotetError
from motet.data.corpus import build as build_module
from motet.data.corpus import discover, token_store
from motet.data.corpus.build import (
    CorpusBuildSpec,
    _exclusive_folder_lock,
    _split_long_text,
    _start_worker,
    build_corpus,
    wait_for_orphans,
)
from motet.data.corpus.discover import discover_corpus
from motet.data.corpus.token_store import DOCUMENT_DTYPE, CorpusManifest, open_built_corpus, read_corpus_manifest
from motet.data.corpus.tokenizer import load_tokenizer
from motet.data.settings import DataSourceSettings
from refusals import refused

BYTES = load_tokenizer("bytes")
HERE = str(Path(__file__).parent)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of 14 shards."""
    monkeypatch.setattr(discover, "_MIN_RANGE_BYTES", 4000)
    return write_records(tmp_path / "records.jsonl", numbered(1000))


def recipe(source: Path, labelled: bool = False) -> CorpusBuildSpec:
    return CorpusBuildSpec(discover_corpus(str(source)), DataSourceSettings(source=str(source)), labelled, BYTES, 0)


def build(source: Path, out: Path, workers: int = 1, *, labelled: bool = False) -> tuple[CorpusManifest, list[int]]:
    heard: list[int] = []
    spec = recipe(source, labelled)
    return build_corpus(spec, out, workers=workers, progress=lambda activity, done, total: heard.append(done)), heard


def interrupt(source: Path, out: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus(recipe(source), out, workers=1, progress=stop)


def silent(what: str, done: int, total: int) -> None: ...


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(folder: Path) -> list[str]:
    store, at, found = open_built_corpus(folder), 0, []
    for length in store.documents["length"].tolist():
        found.append(BYTES.decode(store.read(at, length).tolist()))
        at += length
    return found


def test_the_tokens_are_those_of_the_text(records: Path, tmp_path: Path) -> None:
    manifest, _ = build(records, tmp_path / "out")
    assert texts(tmp_path / "out") == [record["text"] + "<|end|>" for record in numbered(1000)]
    assert len(manifest.shards) == 14 and (manifest.documents, manifest.classes, manifest.loss_mask) == (1000, 0, False)
    assert manifest.tokens == sum(len(record["text"]) + 1 for record in numbered(1000))
    assert read_corpus_manifest(tmp_path / "out") == manifest


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_write_the_same_bytes(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    build(records, tmp_path / "one")
    monkeypatch.setattr(build_module, "_IN_PROCESS_BYTES", 0)
    _, heard = build(records, tmp_path / "many", workers)
    assert content(tmp_path / "one") == content(tmp_path / "many") and heard == sorted(heard)
    assert (heard[0], heard[-1]) == (0, records.stat().st_size)


KILLED = """
import os, signal
def progress(what, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, -1))"


def run_build(prelude: str, source: Path, out: Path, inline: int) -> "subprocess.CompletedProcess[str]":
    script = f"""
import sys
sys.path[:0] = [{HERE!r}, {str(Path(HERE).parent)!r}]
from motet.core.errors import InputError
from test_build import Path, build_module, discover, recipe, silent as progress
build_module._IN_PROCESS_BYTES, discover._MIN_RANGE_BYTES = {inline}, 4000
{prelude}
try:
    build_module.build_corpus(recipe(Path({str(source)!r})), Path({str(out)!r}), workers=2, progress=progress)
except InputError as error:
    sys.exit(str(error))
"""
    # The limit would stop the records of a measurement of coverage, too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_a_killed_build_goes_on_where_it_was(records: Path, tmp_path: Path, inline: int) -> None:
    build(records, tmp_path / "whole")
    out = tmp_path / "killed"
    assert run_build(KILLED, records, out, inline).returncode == -9 and (out / "plan.json").exists()
    assert not (out / "manifest.json").exists()
    done = {path.with_suffix(".bin"): path.with_suffix(".bin").stat() for path in out.glob("*.done")}
    assert 5 <= len(done) < 14  # The text of seven was read, and two may not have been marked yet
    # One of those that were finished was damaged since, another one lost its table.
    spoilt = sorted(done)[:2]
    spoilt[0].write_bytes(b"x" * done[spoilt[0]].st_size)
    spoilt[1].with_suffix(".docs").unlink()
    _, heard = build(records, out)
    assert content(out) == content(tmp_path / "whole") and heard[0] > 0
    for path, before in done.items():
        assert (path.stat().st_ino == before.st_ino) == (path not in spoilt)


def test_an_unfinished_build_of_something_else_starts_anew(records: Path, tmp_path: Path) -> None:
    interrupt(records, tmp_path / "out")
    write_records(records, numbered(700))
    build(records, tmp_path / "out")
    build(records, tmp_path / "other")
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_a_finished_build_is_left_alone_and_a_damaged_one_made_again(records: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(records, out)
    before = content(out)
    assert build(records, out)[1] == []
    (out / "00003.bin").write_bytes(b"x" * (out / "00003.bin").stat().st_size)
    assert build(records, out)[1] and content(out) == before


def refuse(out: Path, message: str) -> None:
    refused(message, build, SMALL, out)


def test_folders_of_others_are_not_touched(records: Path, tmp_path: Path) -> None:
    build(records, tmp_path / "a")
    refuse(tmp_path / "a", r"holds another corpus \(built from '")
    (tmp_path / "b").write_text("mine")
    refuse(tmp_path / "b", "b is a file; choose a folder")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("mine")
    refuse(tmp_path / "c", r"is not empty and holds no corpus \(but 'thesis\.tex'\)")
    assert (tmp_path / "c" / "thesis.tex").read_text() == "mine"
    refuse(tmp_path / "b" / "out", r"cannot write .*b: File exists; free some space or choose another folder")


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_a_disk_that_is_full(tmp_path: Path, inline: int) -> None:
    result = run_build(FULL, write_records(tmp_path / "a.jsonl", [{"text": "x" * 20_000}]), tmp_path / "out", inline)
    assert result.returncode == 1
    assert result.stderr.startswith(f"cannot write {tmp_path / 'out'}: File too large; free some space")
    assert result.stderr.count("\n") == 1 and not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_bad_records_end_the_build_with_a_sentence(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(build_module, "_IN_PROCESS_BYTES", inline)
    lines = records.read_text().splitlines()
    lines[700] = "{"
    records.write_text("\n".join(lines))
    refused(r"records\.jsonl:701: not valid JSON", build, records, tmp_path / "out", 2)
    lines[700] = '{"text": "mended"}'
    records.write_text("\n".join(lines))
    build(records, tmp_path / "out", 2)
    assert texts(tmp_path / "out")[700] == "mended<|end|>"


def test_documents_without_text_make_no_corpus(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"text": ""}] * 3)
    refused(r"a\.jsonl' is empty: it holds no document with text", build, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_told(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_IN_PROCESS_BYTES", 0)

    def start_and_kill(folder: Path, threads: int, lock: int) -> "subprocess.Popen[str]":
        worker = _start_worker(folder, threads, lock)
        worker.kill()
        return worker

    monkeypatch.setattr("motet.data.corpus.build._start_worker", start_and_kill)
    with pytest.raises(MotetError, match=r"ended with code -9 \(killed: out of memory\?.*the same command continues"):
        build(records, tmp_path / "out", 2)


def test_a_worker_ends_with_its_parent(records: Path, tmp_path: Path) -> None:
    interrupt(records, tmp_path / "out")
    with _exclusive_folder_lock(tmp_path / "out") as lock:
        worker = _start_worker(tmp_path / "out", 1, lock)
    assert worker.stdin is not None and worker.stdout is not None
    waiting = threading.Thread(target=wait_for_orphans, args=(tmp_path / "out",))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()  # as long as the worker is
    assert worker.poll() is None
    worker.stdin.close()
    waiting.join()
    assert worker.wait() == 0
    worker.stdout.close()


def test_prompts_are_no_targets_and_labels_are_kept(tmp_path: Path) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"prompt": "ab", "answer": "cde"}, {"text": "fg"}])
    manifest, _ = build(source, tmp_path / "out")
    table = np.fromfile(tmp_path / "out" / "00000.docs", DOCUMENT_DTYPE)
    assert manifest.loss_mask and table["skip"].tolist() == [2, 0] and table["length"].tolist() == [6, 3]
    assert table["label"].tolist() == [-1, -1] and texts(tmp_path / "out") == ["abcde<|end|>", "fg<|end|>"]
    source = write_records(tmp_path / "b.jsonl", [{"text": "x", "label": 4}, {"text": "y", "label": 0}])
    assert build(source, tmp_path / "labels", labelled=True)[0].classes == 5


def test_the_corpus_hash_is_that_of_the_text(tmp_path: Path) -> None:
    def built(name: str, text: str) -> CorpusManifest:
        source = write_records(tmp_path / f"{name}.jsonl", [{"text": letter} for letter in text])
        return build(source, tmp_path / name)[0]

    first, same, other = built("a", "xy"), built("b", "xy"), built("c", "yx")
    assert first.corpus_hash == same.corpus_hash != other.corpus_hash and first.recipe != same.recipe


def test_long_texts_are_cut_where_lines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.data.corpus.build._MAX_TEXT_CHARACTERS", 10)
    assert _split_long_text("short") == ["short"] and _split_long_text("") == []
    assert _split_long_text("line one\nline two\nthree") == ["line one\n", "line two\n", "three"]
    assert _split_long_text("a\nb\n  c\n d e f") == ["a\n", "b\n  c\n d e", " f"]
    assert _split_long_text("x" * 25) == ["x" * 10, "x" * 10, "x" * 5]


def test_two_threads_build_once(records: Path, tmp_path: Path) -> None:
    heard: list[list[int]] = []
    threads = [threading.Thread(target=lambda: heard.append(build(records, tmp_path / "out")[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(heard)[0] == [] != sorted(heard)[1]
    assert token_store.find_damage(tmp_path / "out", read_corpus_manifest(tmp_path / "out"), checksums=True) is None
