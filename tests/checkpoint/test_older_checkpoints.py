"""Checkpoints of earlier versions load; what is changed in them is refused, and nothing in them is executed."""

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint.forged import Evil, forge, load_state
from refusals import refused

# A checkpoint of two ranks as commit d964a2d wrote it, with torch's Distributed Checkpoint.
OLDER = Path(__file__).parent / "data/run_with_metadata/step-00000003"
OLDER_STATE = {
    "master/w": torch.arange(24.0, dtype=torch.float64).view(6, 4),
    "frozen/strides": torch.arange(12.0).view(3, 4).T,
    "step": torch.tensor(3.0),
    "buffer/flags": torch.tensor([True, False, True]),
    "buffer/none": torch.zeros(0, 4),
    "buffer/half": torch.arange(7).bfloat16(),
    "carried/groups/a/error": torch.ones(5),
}


def _older(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLDER, tmp_path / "run/step-00000003"))


def _load_older(where: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.full_like(tensor, 9) for name, tensor in OLDER_STATE.items()}
    load_state(where, state)
    return state


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    loaded = _load_older(_older(tmp_path))
    assert all(loaded[name].equal(tensor) for name, tensor in OLDER_STATE.items())


def _change_metadata(change: Callable[[Metadata], Any]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        metadata = pickle.loads(content)
        change(metadata)
        return pickle.dumps(metadata)

    return changed


def _of(name: str) -> Callable[[Metadata], Any]:
    return lambda metadata: next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _with_evil(kind: str) -> Callable[[bytes], bytes]:
    """A pickle that does something, where torch's own would be."""

    def plant(content: bytes) -> bytes:
        folder = str(Evil.folder)
        metadata = pickle.loads(content)
        if kind == "inside":
            metadata.planner_data = Evil()
            return pickle.dumps(metadata)
        if kind == "by number":
            return b"\x80\x02\x82\x01" + content
        if kind == "by name":
            return f"cos\nmkdir\n(V{folder}\ntR.".encode()
        return f"(ios\nmkdir\nV{folder}\n.".encode().replace(b"(i", b"(V%s\ni" % folder.encode(), 1)

    return plant


def _archived(compression: int, *, program: Callable[[], bytes] | None = None) -> Callable[[bytes], bytes]:
    """The first chunk of a file as an archive of the same length that is compressed, or holds another pickle."""

    def archived(content: bytes) -> bytes:
        infos = pickle.loads((OLDER / ".metadata").read_bytes()).storage_data.values()
        length = next(i.length for i in infos if (i.relative_path, i.offset) == ("__1_0.distcp", 0))
        buffer = BytesIO()
        with zipfile.ZipFile(BytesIO(content[:length])) as plain, zipfile.ZipFile(buffer, "w", compression) as archive:
            for each in plain.namelist():
                is_replaced = each.endswith("data.pkl")
                archive.writestr(each, program() if program and is_replaced else plain.read(each))
            archive.comment = b"."
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.comment = bytes(1 + length - len(buffer.getvalue()))
        return buffer.getvalue() + content[length:]

    return archived


STORED = zipfile.ZIP_STORED


def _code() -> bytes:
    return pickle.dumps(Evil(), protocol=2)


class _RepeatedSize:
    """A size whose numbers are nested tuples: written out it has thousands, and could have as many as one likes."""

    def __reduce__(self) -> tuple[Any, ...]:
        nested: Any = 0
        for _ in range(12):
            nested = (nested, nested)
        return torch.Size, ([nested],)


OLDER_FORGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "code": (".metadata", lambda _: pickle.dumps(Evil()), "it names posix.mkdir, which does not belong there"),
    "code in it": (".metadata", _with_evil("inside"), "it names posix.mkdir, which does not belong there"),
    "code by name": (".metadata", _with_evil("by name"), "not what torch writes"),
    "code as an instance": (".metadata", _with_evil("instance"), "not what torch writes"),
    "a class by number": (".metadata", _with_evil("by number"), "not what torch writes"),
    "a builtin": (".metadata", lambda _: pickle.dumps(getattr), "it names builtins.getattr"),
    "a function of torch": (".metadata", lambda _: pickle.dumps(torch.load), "it names torch.serialization.load"),
    "a number": (".metadata", lambda _: pickle.dumps(5), "not what torch writes"),
    "nothing": (".metadata", lambda _: b"", "not what torch writes"),
    "a deep key": (".metadata", lambda _: b"\x80\x04})" + b"\x85" * 3 * 10**5 + b"K\x01s.", "not what torch writes"),
    "a large buffer": (".metadata", lambda _: b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "not what torch writes"),
    "a large memo": (".metadata", lambda _: b"\x80\x04Nr\xff\xff\xff\xff.", "not what torch writes"),
    "another shape": (
        ".metadata",
        _change_metadata(lambda m: setattr(m.state_dict_metadata["master/w"], "size", torch.Size([4, 6]))),
        r"'master/w' is \[4, 6\] of float64, and in the manifest \[6, 4\] of float64",
    ),
    "another file": (
        ".metadata",
        _change_metadata(lambda m: setattr(_of("step")(m), "relative_path", "../../x")),
        "must be of letters",
    ),
    "an offset": (".metadata", _change_metadata(lambda m: setattr(_of("step")(m), "offset", 1)), "must fill its"),
    "a negative offset": (".metadata", _change_metadata(lambda m: setattr(_of("step")(m), "offset", -1)), "at least 0"),
    "a missing chunk": (".metadata", _change_metadata(lambda m: m.storage_data.popitem()), "elements of"),
    "a pickle as tensors": ("__1_0.distcp", lambda c: pickle.dumps(Evil()).ljust(len(c), b"."), "not a zip"),
    "a compressed archive": ("__1_0.distcp", _archived(zipfile.ZIP_DEFLATED), "holds something else .*: compressed"),
    "code in an archive": ("__1_0.distcp", _archived(STORED, program=_code), "else .*: Weights only"),
    "another protocol": ("__1_0.distcp", _archived(STORED, program=lambda: b"\x80\x01."), "else .*: Detected"),
    "a size of many numbers": (
        ".metadata",
        _change_metadata(lambda m: setattr(m.state_dict_metadata["step"], "size", _RepeatedSize())),
        "not what torch writes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER_FORGED)
def test_forged_files_of_an_earlier_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(Evil, "folder", tmp_path / "pwned")
    where, (changed, change, sentence) = _older(tmp_path), OLDER_FORGED[case]
    forge(where, changed, change)
    refused(f"is damaged .*({sentence}).*; remove it to use the one before it", _load_older, where)
    assert not Evil.folder.exists()


def test_older_manifests_are_checked_as_well(tmp_path: Path) -> None:
    where = _older(tmp_path)
    manifest = json.loads((where / "manifest.json").read_text())
    assert manifest["checksums"]["saved_by.json"] == crc32((where / "saved_by.json").read_bytes())
    for change, sentence in (
        ({"step": 4}, "step = 4 must be that of the folder's name"),
        ({"checksums": {}}, "is not among them"),
        ({"format": 2}, "tensors.json is not among them"),
        ({"shapes": {"w": "x"}}, "shapes.w = 'x' must be"),
    ):
        (where / "manifest.json").write_text(json.dumps({**manifest, **change}))
        refused(sentence, _load_older, where)
