"""Finding files: which ones, in which order, in which pieces, and what is told when there are none."""

import os
from pathlib import Path

import pytest

from motet.data.corpus import discover
from motet.data.corpus.discover import discover_corpus, target_range_bytes
from refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a.txt", "c.jsonl", "picture.png", ".hidden.txt", ".git/x.txt", "a/empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else name)
    return tmp_path


def names(source: str, folder: Path) -> list[str]:
    return [str(Path(piece.path).relative_to(folder)) for piece in discover_corpus(source).file_ranges]


def test_a_folder_is_read_by_name_without_what_is_hidden_unknown_or_empty(folder: Path) -> None:
    assert names(str(folder), folder) == ["a/z.md", "a.txt", "b.txt", "c.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*.txt", ["a.txt", "b.txt"]), ("**/*.md", ["a/z.md"]), ("[bc].*", ["b.txt", "c.jsonl"]), ("b.tx?", ["b.txt"])],
)
def test_patterns(folder: Path, pattern: str, expected: list[str]) -> None:
    assert names(f"{folder}/{pattern}", folder) == expected


def test_the_identity_follows_the_files(folder: Path) -> None:
    first = discover_corpus(str(folder)).identity
    assert discover_corpus(str(folder)).identity == first
    os.utime(folder / "b.txt", (1, 1))
    second = discover_corpus(str(folder)).identity
    (folder / "d.txt").write_text("more")
    assert len({first, second, discover_corpus(str(folder)).identity}) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", r"'nowhere' does not exist"),
        ("{}/picture.png", r"unknown extension '\.png'; known are \.jsonl, \.ndjson, \.parquet for records"),
        ("{}/*.png", "holds no file of a known kind"),
        ("{}/a/empty.txt", r"is empty \(1 files of 0 bytes\)"),
    ],
)
def test_sentences(folder: Path, source: str, message: str) -> None:
    refused(message, discover_corpus, source.format(folder))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("this is no parquet file at all")
    refused(r"x\.parquet cannot be read as Parquet", discover_corpus, str(tmp_path))


def test_the_library_is_source_text_without_its_tests() -> None:
    paths = [Path(piece.path) for piece in discover_corpus("stdlib").file_ranges]
    assert len(paths) > 300 and all(path.suffix == ".py" for path in paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts)]
    assert "argparse.py" in {path.name for path in paths}


def test_large_files_are_cut_and_small_ones_share_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_MIN_RANGE_BYTES", 100)
    (tmp_path / "large.jsonl").write_bytes(b"x" * 250)
    for number in range(5):
        (tmp_path / f"small{number}.txt").write_bytes(b"x" * 40)
    found = discover_corpus(str(tmp_path))
    spans = [(p.start, p.stop, p.size) for p in found.file_ranges[:3]]
    assert spans == [(0, 100, 100), (100, 200, 100), (200, 250, 50)]
    assert [[piece.size for piece in shard] for shard in found.shards()] == [[100], [100], [50, 40], [40, 40], [40, 40]]
    assert found.size == 450


@pytest.mark.parametrize(("total", "size"), [(1, 2 << 20), (1 << 30, 4 << 20), (1 << 40, 256 << 20)])
def test_pieces_grow_with_the_corpus(total: int, size: int) -> None:
    assert target_range_bytes(total) == size
