"""Documents of text, JSONL, Parquet and datasets, and what is said about records that are not as they should be."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import numbered, write_records
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.data.corpus import discover
from motet.data.corpus.discover import FileRange, TextDocument, discover_corpus, read_documents
from motet.data.settings import DataSourceSettings


def read(source: str, labelled: bool = False, **fields: Any) -> list[TextDocument]:
    settings = DataSourceSettings(source=source, **fields)
    parts = (read_documents(part, settings, labelled) for part in discover_corpus(source).file_ranges)
    return [document for documents in parts for document in documents]


def complaint(source: Path, labelled: bool = False, **fields: Any) -> str:
    with pytest.raises(InputError) as error:
        read(str(source), labelled, **fields)
    return str(error.value).replace(str(source.parent) + "/", "")


def test_a_text_file_is_one_document_kept_to_the_letter(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ä\r\nö\n\n".encode() + b"\xff")
    assert read(str(tmp_path)) == [TextDocument("ä\r\nö\n\n\ufffd")]


def test_records(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"text": ""}, {"prompt": "two?", "answer": "two", "text": "not this"}]
    records += [{"text": None}, {"prompt": "only a prompt", "text": "three"}]
    expected = [TextDocument("one"), TextDocument("two", prompt="two?"), TextDocument("three")]
    assert read(str(write_records(tmp_path / "a.jsonl", records))) == expected


def test_fields_have_other_names(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"body": "x", "class": 3}, {"q": "y", "a": "z"}])
    found = read(str(path), text_field="body", prompt_field="q", answer_field="a")
    assert found == [TextDocument("x"), TextDocument("z", "y")]
    path = write_records(tmp_path / "b.jsonl", [{"body": "x", "class": 3}])
    assert read(str(path), True, text_field="body", label_field="class") == [TextDocument("x", label=3)]


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 60), st.booleans())
def test_pieces_of_a_file_hold_every_line_once(texts: list[str], step: int, last_break: bool) -> None:
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n" * last_break
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(lines.encode("utf-8", "surrogatepass"))
        size = path.stat().st_size
        pieces = [FileRange(str(path), "jsonl", at, min(at + step, size), step) for at in range(0, size, step)]
        fields = DataSourceSettings(source="a")
        found = [document.text for piece in pieces for document in read_documents(piece, fields, False)]
    assert found == [text for text in texts if text]


def test_lines_are_counted_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_MIN_RANGE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n' * 30 + '{"text": 5}\n' + '{"text": "x"}\n' * 30)
    assert complaint(path) == "a.jsonl:61: field 'text' is 5, not a text; make it one, or read another field"
    path.write_text('{"text": "x"}\n' * 30 + "{'text'}\n")
    assert complaint(path).startswith("a.jsonl:31: not valid JSON: Expecting property name")


@pytest.mark.parametrize(
    ("line", "labelled", "message"),
    [
        ('{"body": "x", "id": 1}', False, "a.jsonl:1: the record has neither the field 'text' nor both 'prompt' and"),
        ('{"prompt": "x"}', False, "a.jsonl:1: the record has neither the field 'text' nor both 'prompt' and 'answer'"),
        (
            "{}",
            False,
            "a.jsonl:1: the record has neither the field 'text' nor both 'prompt' and 'answer' nor 'messages'",
        ),
        ("[1, 2]", False, "a.jsonl:1: a record is an object with fields, not [1, 2]"),
        ('{"text": ["x"]}', False, "a.jsonl:1: field 'text' is [\"x\"], not a text"),
        ('{"text": "x"', False, "a.jsonl:1: not valid JSON"),
        ('{"text": "x"}', True, "a.jsonl:1: the label 'label' is missing; number the classes from 0"),
        ('{"text": "x", "label": -1}', True, "a.jsonl:1: the label 'label' is -1"),
        ('{"text": "x", "label": "good"}', True, "a.jsonl:1: the label 'label' is \"good\""),
        ('{"text": "x", "label": 1.0}', True, "a.jsonl:1: the label 'label' is 1.0"),
    ],
)
def test_sentences(tmp_path: Path, line: str, labelled: bool, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    assert complaint(tmp_path / "a.jsonl", labelled).startswith(message)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert read(str(tmp_path)) == [TextDocument("a?b")]


def test_plain_text_has_no_label(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    words = "a.txt is plain text, but objective `classify` needs"
    assert complaint(tmp_path / "a.txt", labelled=True).startswith(words)


def test_a_file_that_vanished(tmp_path: Path) -> None:
    piece = FileRange(str(tmp_path / "gone.txt"), "text", 0, 1, 1)
    with pytest.raises(InputError, match=r"cannot read .*gone\.txt: No such file"):
        list(read_documents(piece, DataSourceSettings(source="a"), False))


def test_parquet_holds_the_same_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_MIN_RANGE_BYTES", 500)
    records = [{**record, "label": i % 3, "other": i} for i, record in enumerate(numbered(100))]
    rows = write_records(tmp_path / "a.jsonl", records)
    columns = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(records), columns, row_group_size=7)
    assert len(discover_corpus(str(columns)).file_ranges) > 2
    expected = [TextDocument(r["text"], label=r["label"]) for r in records]
    assert read(str(rows), True) == read(str(columns), True) == expected
    assert complaint(columns, text_field="body").startswith("a.parquet:1: the record has neither the field 'body' nor")


class StandIn:
    data = SimpleNamespace(nbytes=3000)
    _fingerprint = "f"

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: values[rows] for name, values in self.columns.items()}

    def select_columns(self, names: list[str]) -> "StandIn":
        return StandIn({name: self.columns[name] for name in names})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `datasets`, of which one test needs one answer."""
    library = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "datasets", library)
    discover.open_hf_dataset.cache_clear()
    yield library
    discover.open_hf_dataset.cache_clear()


def test_a_dataset_in_pieces(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_MIN_RANGE_BYTES", 1000)
    records, asked = numbered(2500), []

    def load(name: str, config: str | None) -> dict[str, StandIn]:
        asked.append((name, config))
        return {"train": StandIn({"text": [r["text"] for r in records], "id": list(range(2500))}), "test": StandIn({})}

    library.load_dataset = load
    spans = [(p.start, p.stop) for p in discover_corpus("hf:some/name:en").file_ranges]
    assert spans == [(0, 833), (833, 1666), (1666, 2499), (2499, 2500)]
    assert read("hf:some/name:en") == [TextDocument(record["text"]) for record in records]
    assert asked == [("some/name", "en")]


def test_a_saved_dataset(library: Any, tmp_path: Path) -> None:
    library.load_from_disk = lambda folder: StandIn({"text": [folder]})
    assert read(f"hf:{tmp_path}") == [TextDocument(str(tmp_path))]


def test_what_is_wrong_with_a_dataset(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            discover_corpus(name)

    library.load_dataset = lambda name, config: {"validation": None, "test": None}
    refuse("hf:a", "has no split `train`, only validation, test")
    library.load_dataset = lambda name, config: StandIn({"text": []})
    refuse("hf:b", r"'hf:b' is empty \(0 rows\)")
    library.load_dataset = Mock(side_effect=ConnectionError("cannot reach the hub\nmore"))
    refuse("hf:c", r"'hf:c' could not be loaded: cannot reach the hub$")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuse("hf:some/name", r"needs the package `datasets`; install motet\[hf\]")
