"""Corpora: text, JSON Lines, Parquet, built folders, Megatron's format, and tokenizers.

The truth is the data of the case: the documents as Python values, or the arrays of tokens. Files with changed bytes are
read by the library of their format alone. motet must hold the same tokens and documents after it has prepared the data,
and must be able to make batches of them.
"""

import hashlib
import itertools
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, FuzzTarget, check_equal
from motet.core.errors import InputError
from motet.data.corpus.prepare import prepare_data
from motet.data.corpus.token_store import PreparedData
from motet.data.corpus.tokenizer import Tokenizer, load_tokenizer, train_bpe
from motet.data.samples.dataset import open_token_store
from motet.data.samples.loader import BatchLoader
from motet.data.settings import DataSettings

END = 256  # The token of motet's tokenizer `bytes` that ends a document
DOCUMENT = struct.Struct("<QQIi")  # Length, hash, tokens that are not targets, class
MEGATRON_WIDTHS = {1: "<u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Document = tuple[list[int], int, int]  # Tokens, the number at the start that are not targets, class


class CorpusTarget(FuzzTarget):
    """Files of text and of tokens, from the disk to the first batches."""

    name: ClassVar[str] = "corpora"
    first_check: ClassVar[str] = (
        "the file is of its format: JSON, Parquet, an index of Megatron, a manifest, a tokenizer"
    )
    extra_bytes: ClassVar[int] = 8 << 30  # A page of Parquet announces up to 2 GiB, for which its library makes room
    first_refusals: ClassVar[str] = (
        r"not valid JSON|cannot be read as Parquet|is not a Megatron index|holds no corpus|is not a tokenizer\.json|"
        r"is empty|is cut short|is not UTF-8|is damaged"
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.records = [{"text": f"Record {i} is here.\n" + "More of it. " * (i % 5)} for i in range(24)]
        self.built = folder / "built"
        source = folder / "base.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        prepared = prepare_data(self._settings(source))
        shutil.copytree(prepared.corpora[0].location, self.built)
        self.bpe = folder / "bpe"
        self.bpe.mkdir()
        train_bpe((record["text"] for record in self.records), 300, 0).save(self.bpe)
        self.kinds: tuple[Callable[[FuzzCase, Path], None], ...] = (
            self._run_text,
            self._run_json_lines,
            self._run_json_lines,
            self._run_parquet,
            self._run_parquet,
            self._run_megatron,
            self._run_built,
            self._run_tokenizer,
        )

    def run(self, case: FuzzCase) -> None:
        scratch = self.folder / "case"
        scratch.mkdir()
        try:
            case.rng.choice(self.kinds)(case, scratch)
        finally:
            shutil.rmtree(scratch)
            shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def _settings(self, source: Path, **values: Any) -> DataSettings:
        small = {"tokenizer": "bytes", "sequence_length": 16, "batch_sequences": 4, "workers": 1}
        return DataSettings.model_validate(
            {"source": str(source), "cache": str(self.folder / "cache"), **small, **values}
        )

    def _check(self, settings: DataSettings, expected: list[Document]) -> None:
        """The prepared data hold exactly these documents, and make batches."""
        prepared = prepare_data(settings)
        corpus = prepared.corpora[0]
        store = open_token_store(corpus.kind, corpus.location)
        tokens = store.read(0, sum(len(tokens) for tokens, _, _ in expected)).tolist()
        check_equal("the number of documents", len(store.documents), len(expected))
        check_equal("the lengths of the documents", store.documents["length"].tolist(), [len(d[0]) for d in expected])
        check_equal("tokens without a target", store.documents["skip"].tolist(), [skip for _, skip, _ in expected])
        check_equal("the classes", store.documents["label"].tolist(), [label for _, _, label in expected])
        check_equal("the tokens", tokens, [token for tokens, _, _ in expected for token in tokens])
        _check_batches(prepared, settings)

    # --- text and records --------------------------------------------------------------------------

    def _run_text(self, case: FuzzCase, scratch: Path) -> None:
        text = "".join(record["text"] for record in self.records).encode()
        if case.is_structured:
            text = (text.decode() + case.rng.choice(mutations.TEXTS)).encode("utf-8", "surrogatepass")
            case.note(f"text ends in {text[-20:]!r}")
        else:
            text, change = mutations.change_bytes(case.rng, text)
            case.note(change)
        path = scratch / f"corpus{case.rng.choice(('.txt', '.md', '.py'))}"
        path.write_bytes(text)
        expected = [(_bytes_tokens(text.decode("utf-8", "replace")), 0, -1)] if text else []
        self._check(self._settings(path), expected)

    def _records(self, case: FuzzCase) -> tuple[list[Any], dict[str, Any]]:
        """Records for one of the objectives, and the settings that read them."""
        match case.rng.choice(("text", "text", "prompts", "classes")):
            case "prompts":
                return [{"prompt": f"Say {i}.", "answer": record["text"]} for i, record in enumerate(self.records)], {}
            case "classes":
                return [{**record, "label": i % 3} for i, record in enumerate(self.records)], {"objective": "classify"}
        return [dict(record) for record in self.records], {}

    def _run_json_lines(self, case: FuzzCase, scratch: Path) -> None:
        records, options = self._records(case)
        path = scratch / "corpus.jsonl"
        if case.is_structured:
            index = case.rng.randrange(len(records))
            records[index], change = mutations.change_tree(case.rng, records[index])
            case.note(f"record {index}: {change}")
            content = b"".join(_json_line(record) for record in records)
        else:
            content, change = mutations.change_bytes(case.rng, b"".join(_json_line(record) for record in records))
            case.note(change)
        path.write_bytes(content)
        try:
            parsed = [json.loads(line) for line in content.split(b"\n") if line.strip()]
        except (ValueError, RecursionError):
            parsed = None
        self._check_records(path, parsed, options)

    def _run_parquet(self, case: FuzzCase, scratch: Path) -> None:
        records, options = self._records(case)
        path = scratch / "corpus.parquet"
        table = pa.Table.from_pylist(records)
        if case.is_structured:
            column = case.rng.choice(table.column_names)
            table, change = _changed_column(case, table, column)
            case.note(f"column {column}: {change}")
        pq.write_table(table, path, row_group_size=case.rng.choice((1, 7, 100)))
        if not case.is_structured:
            content, change = mutations.change_bytes(case.rng, path.read_bytes())
            case.note(change)
            path.write_bytes(content)
        try:
            parsed = [dict(row) for row in pq.read_table(path).to_pylist()]
        except (pa.ArrowException, OSError, ValueError):
            parsed = None
        self._check_records(path, parsed, options)

    def _check_records(self, path: Path, records: list[Any] | None, options: dict[str, Any]) -> None:
        """`records` are None where the library of the format cannot read the file."""
        expected = None if records is None else _documents(records, has_labels=bool(options))
        settings = self._settings(path, **options)
        if expected is None:
            prepare_data(settings)
            raise FindingError("a file was accepted that cannot be read, or has a record that is none")
        self._check(settings, expected)

    # --- tokens --------------------------------------------------------------------------------------

    def _run_megatron(self, case: FuzzCase, scratch: Path) -> None:
        rng, prefix = case.rng, scratch / "corpus"
        code = rng.choice(list(MEGATRON_WIDTHS))
        sequences = [[rng.randrange(1, 120) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
        index, tokens = _megatron_files(sequences, code)
        if not case.is_structured:
            which = rng.randrange(2)
            changed, change = mutations.change_bytes(rng, (index, tokens)[which])
            index, tokens = (changed, tokens) if which == 0 else (index, changed)
            case.note(f"{('.idx', '.bin')[which]}: {change}")
        else:
            start, width = rng.choice(((9, 8), (17, 1), (18, 8), (26, 8), *((34 + 4 * i, 4) for i in range(12)),
                                       *((34 + 48 + 8 * i, 8) for i in range(25))))  # fmt: skip
            value = rng.choice((0, 1, 2, 7, 13, 255, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1, rng.randrange(40)))
            value &= (1 << 8 * width) - 1
            index = index[:start] + value.to_bytes(width, "little") + index[start + width :]
            case.note(f"{width} bytes at {start} of .idx set to {value}")
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").write_bytes(tokens)
        settings = self._settings(prefix)
        self._check(settings, _megatron_documents(index, tokens))

    def _run_built(self, case: FuzzCase, scratch: Path) -> None:
        rng, folder = case.rng, scratch / "built"
        shutil.copytree(self.built, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        if not case.is_structured:
            path = folder / rng.choice(("manifest.json", "00000.bin", "00000.docs"))
            before = path.read_bytes()
            content, change = mutations.change_bytes(rng, before)
            path.write_bytes(content)
            case.note(f"{path.name}: {change}")
            if path.name != "manifest.json" and content != before:
                prepare_data(self._settings(folder))
                raise FindingError("a changed file was accepted")
        elif rng.random() < 0.4:
            manifest, change = mutations.change_tree(rng, manifest)
            (folder / "manifest.json").write_bytes(_json_line(manifest))
            case.note(f"manifest: {change}")
        else:
            case.note(_forge(case, folder, manifest))
        self._check(self._settings(folder), _built_documents(folder))

    def _run_tokenizer(self, case: FuzzCase, scratch: Path) -> None:
        folder = scratch / "bpe"
        shutil.copytree(self.bpe, folder)
        path = folder / case.rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
        if case.is_structured:
            tree, change = mutations.change_tree(case.rng, json.loads(path.read_text()))
            path.write_bytes(_json_line(tree))
        else:
            content, change = mutations.change_bytes(case.rng, path.read_bytes())
            path.write_bytes(content)
        case.note(f"{path.name}: {change}")
        tokenizer = load_tokenizer(str(folder))
        library = tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        text = self.records[3]["text"] + " unseen \u00e9\U0001f600"
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = tokenizer.backend.encode_special_tokens
        check_equal("the tokens of a text", tokenizer.encode(text), library.encode(text, add_special_tokens=False).ids)
        _check_special_tokens(tokenizer)
        source = scratch / "corpus.txt"
        source.write_text("".join(record["text"] for record in self.records))
        settings = self._settings(source, tokenizer=str(folder))
        _check_batches(prepare_data(settings), settings)


def _check_batches(prepared: PreparedData, settings: DataSettings) -> None:
    """The first batches have the shape that the settings say, and tokens of the vocabulary."""
    loader = BatchLoader(prepared, settings, seed=0)
    for step in range(2):
        batch = loader.batch(step, range(settings.batch_sequences))
        check_equal("the rows of a batch", batch.tokens.shape[0], settings.batch_sequences)
        if not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < prepared.vocab_size:
            raise FindingError(f"a batch has tokens outside of 0 to {prepared.vocab_size - 1}")


def _check_special_tokens(tokenizer: Tokenizer) -> None:
    for name, token in (("end", tokenizer.end_id), ("pad", tokenizer.pad_id), ("mask", tokenizer.mask_id)):
        if token is not None and not 0 <= token < tokenizer.vocab_size:
            raise FindingError(f"the {name} token {token} is outside of the vocabulary")


def _bytes_tokens(text: str) -> list[int]:
    return [*text.encode("utf-8", "replace"), END]


def _json_line(record: Any) -> bytes:
    """One line of JSON, also with numbers that Python does not print."""
    return (_json_text(record) + "\n").encode("utf-8", "surrogatepass")


def _json_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_json_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json_text, value)) + "]"
    return json.dumps(value)


def _documents(records: list[Any], *, has_labels: bool) -> list[Document] | None:
    """The documents of records as docs/reference describes them; None if one of them is not a record."""
    documents = []
    for record in records:
        if not isinstance(record, dict):
            return None
        is_prompt = not has_labels and "prompt" in record and "answer" in record
        texts = [record["prompt"], record["answer"]] if is_prompt else [record.get("text", 0)]
        label = record.get("label") if has_labels else -1
        if any(text is not None and not isinstance(text, str) for text in texts):
            return None
        if not isinstance(label, int) or not -1 <= label < 2**31 or (has_labels and label < 0):
            return None
        prompt, text = ("", *texts)[-2:]
        if text:
            skipped = list((prompt or "").encode("utf-8", "replace"))
            documents.append((skipped + _bytes_tokens(text), len(skipped), int(label)))
    return documents


def _changed_column(case: FuzzCase, table: pa.Table, name: str) -> tuple[pa.Table, str]:
    """The table with another type or other values in one column."""
    index, values = table.column_names.index(name), table.column(name).to_pylist()
    rng = case.rng
    kind = rng.choice(("renamed", "no rows", "value", "value", *COLUMNS))
    if kind == "no rows":
        return table.slice(0, 0), kind
    if kind == "renamed":
        other = rng.choice(("", "Text", table.column_names[0], "é" * 50))
        return table.rename_columns([other if each == name else each for each in table.column_names]), f"is {other!r}"
    if kind == "value":
        row = rng.randrange(len(values))
        values[row] = rng.choice([text for text in mutations.TEXTS if "\ud800" not in text] + [None])
        array = pa.array([None if value is None else str(value) for value in values])
    else:
        array = COLUMNS[kind]([str(value) for value in values])
    return table.set_column(index, name, array), kind


def _text_of_noise(texts: list[str]) -> pa.Array:
    offsets, noise = np.arange(len(texts) + 1, dtype=np.int32) * 3, b"\xff\xfea" * len(texts)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(noise))


COLUMNS: dict[str, Callable[[list[str]], Any]] = {
    "null": lambda texts: pa.nulls(len(texts), pa.null()),
    "null text": lambda texts: pa.nulls(len(texts), pa.string()),
    "binary": lambda texts: pa.array([text.encode() for text in texts], pa.binary()),
    "not UTF-8": _text_of_noise,
    "large text": lambda texts: pa.array(texts, pa.large_string()),
    "dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "lists": lambda texts: pa.array([[text] for text in texts]),
    "structures": lambda texts: pa.array([{"a": text} for text in texts]),
    "whole numbers": lambda texts: pa.array(range(len(texts)), pa.int64()),
    "numbers": lambda texts: pa.array(range(len(texts)), pa.float64()),
    "small numbers": lambda texts: pa.array(range(len(texts)), pa.uint8()),
    "times": lambda texts: pa.array([10**18] * len(texts), pa.timestamp("ns")),
}
"""Other types and contents of a column, from the texts that it had."""


def _megatron_files(sequences: list[list[int]], code: int) -> tuple[bytes, bytes]:
    dtype = np.dtype(MEGATRON_WIDTHS[code])
    lengths = [len(sequence) for sequence in sequences]
    places = (np.cumsum([0, *lengths])[:-1] * dtype.itemsize).tolist()
    borders = range(len(sequences) + 1)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    tokens = np.array([token for sequence in sequences for token in sequence], dtype).tobytes()
    return index + struct.pack(f"<{len(borders)}q", *borders), tokens


def _megatron_documents(index: bytes, tokens: bytes) -> list[Document]:
    """The documents by the description of the format; nothing of motet has read the files."""
    try:
        _, code, count, borders = struct.unpack_from("<QBQQ", index, 9)
        dtype = np.dtype({**MEGATRON_WIDTHS, 2: "<i1", 6: "<f8", 7: "<f4"}[code])
        lengths = struct.unpack_from(f"<{count}i", index, 34)
        marks = struct.unpack_from(f"<{borders}q", index, 34 + 12 * count)
        values = np.frombuffer(tokens, dtype).tolist()
        ends = np.cumsum([0, *lengths]).tolist()
        starts = sorted({0, *marks, count})
        spans = [(ends[first], ends[last]) for first, last in itertools.pairwise(starts)]
        return [(values[first:last], 0, -1) for first, last in spans if last > first]
    except (struct.error, KeyError, IndexError, ValueError, OverflowError, MemoryError):
        return []


def _forge(case: FuzzCase, folder: Path, manifest: dict[str, Any]) -> str:
    """Change tokens or documents of a built folder, with sizes and checksums that fit."""
    rng = case.rng
    tokens = np.fromfile(folder / "00000.bin", manifest["dtype"])
    table = bytearray((folder / "00000.docs").read_bytes())
    if rng.random() < 0.4:
        index, value = rng.randrange(len(tokens)), rng.choice((0, 255, END, 258, 259, 65535))
        tokens[index] = value
        change = f"token {index} = {value}"
    else:
        row, field = rng.randrange(len(table) // DOCUMENT.size), rng.randrange(4)
        values = list(DOCUMENT.unpack_from(table, row * DOCUMENT.size))
        limit = (2**64, 2**64, 2**32, 2**31)[field]
        values[field] = rng.choice((0, 1, 5, 2**20, limit // 2, limit - 1, *((-1, -(2**31)) if field == 3 else ())))
        DOCUMENT.pack_into(table, row * DOCUMENT.size, *values)
        change = f"document {row}: {dict(zip(('length', 'hash', 'skip', 'label'), values, strict=True))}"
    (folder / "00000.bin").write_bytes(tokens.tobytes())
    (folder / "00000.docs").write_bytes(table)
    content = (folder / "00000.bin").read_bytes() + bytes(table)
    manifest["shards"][0]["checksum"] = hashlib.blake2b(content, digest_size=16).hexdigest()
    (folder / "manifest.json").write_bytes(_json_line(manifest))
    return f"forged with a fitted checksum: {change}"


def _built_documents(folder: Path) -> list[Document]:
    """The documents that the two files of a built folder hold, as far as they go together."""
    tokens = np.fromfile(folder / "00000.bin", "<u2").tolist()
    documents, start = [], 0
    for length, _, skip, label in DOCUMENT.iter_unpack((folder / "00000.docs").read_bytes()):
        documents.append((tokens[start : start + length], skip, label))
        start += length
    if start != len(tokens):
        raise InputError("the documents do not add up to the tokens")
    return documents
