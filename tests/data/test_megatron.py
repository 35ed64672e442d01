"""Megatron's format: every dtype code, documents of several sequences, and files that are not what they should be."""

import struct
from pathlib import Path

import numpy as np
import pytest
from corpora import MEGATRON_DTYPES, write_megatron

from motet.core.errors import InputError
from motet.data.corpus.token_store import find_megatron_prefix, open_megatron
from refusals import refused

DOCUMENTS = [[[5, 6, 7], [8]], [[9]], [], [[10, 11], [], [12]]]


@pytest.mark.parametrize("code", MEGATRON_DTYPES)
def test_every_dtype(tmp_path: Path, code: int) -> None:
    store = open_megatron(write_megatron(tmp_path / "c", DOCUMENTS, code))
    assert store.documents["length"].tolist() == [4, 1, 3]  # an empty document is none
    assert store.read(0, 8).astype(int).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert store.read(3, 2).astype(int).tolist() == [8, 9] and len(np.unique(store.documents["hash"])) == 3


def test_modes_behind_the_index_do_no_harm(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "c", DOCUMENTS, 4)
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(bytes(6))
    assert open_megatron(prefix).documents["length"].tolist() == [4, 1, 3]


def test_more_documents_keep_the_splits_of_the_first(tmp_path: Path) -> None:
    few = open_megatron(write_megatron(tmp_path / "few", [[[i]] for i in range(10)], 4))
    many = open_megatron(write_megatron(tmp_path / "many", [[[i]] for i in range(30)], 4))
    assert few.documents["hash"].tolist() == many.documents["hash"][:10].tolist()
    assert few.fingerprint != many.fingerprint


def test_prefixes(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "c.v1_document", DOCUMENTS, 8)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert find_megatron_prefix(str(name)) == prefix
    assert find_megatron_prefix(str(tmp_path)) is None
    Path(f"{prefix}.bin").unlink()
    refused(r"is a Megatron corpus, but .*document\.bin does not exist", find_megatron_prefix, str(prefix))
    prefix.mkdir()
    assert find_megatron_prefix(str(prefix)) is None  # a folder is meant, whatever lies beside it


def damaged(tmp_path: Path, place: int, value: bytes, cut: int | None = None) -> str:
    prefix = write_megatron(tmp_path / "c", DOCUMENTS, 4)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[place : place + len(value)] = value
    Path(f"{prefix}.idx").write_bytes(index[:cut])
    with pytest.raises(InputError) as error:
        open_megatron(prefix)
    return str(error.value).replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize(
    ("place", "value", "cut", "message"),
    [
        (0, b"PK", None, r"c.idx is not a Megatron index: it starts with b'PKIDIDX\x00\x00' instead of"),
        (9, struct.pack("<Q", 2), None, "c.idx: version 2 with dtype code 4 is unknown"),
        (17, b"\x09", None, "c.idx: version 1 with dtype code 9 is unknown"),
        (0, b"", 20, "c.idx is cut short: 20 bytes, the header alone has 34"),
        (0, b"", 100, "c.idx is cut short: 100 bytes where 6 sequences and 5 borders need 146"),
        (34 + 24 + 8, struct.pack("<q", 99), None, "c.idx: the sequences have gaps or overlaps"),
        (34 + 72 + 8, struct.pack("<q", 9), None, "c.idx: the document borders do not ascend within the 6 sequences"),
        (34, struct.pack("<i", -3), None, "c.idx: the sequences have gaps or overlaps"),
    ],
)
def test_damaged_indices(tmp_path: Path, place: int, value: bytes, cut: int | None, message: str) -> None:
    assert damaged(tmp_path, place, value, cut).startswith(message)


def test_truncated_tokens(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "c", DOCUMENTS, 4)
    tokens = Path(f"{prefix}.bin")
    tokens.write_bytes(tokens.read_bytes()[:-3])
    refused(r"c\.bin has 29 bytes, but c\.idx says 8 tokens of int32 = 32 bytes", open_megatron, prefix)


def test_nothing_in_it(tmp_path: Path) -> None:
    refused(r"is empty \(0 tokens\)", open_megatron, write_megatron(tmp_path / "c", [[]], 4))
