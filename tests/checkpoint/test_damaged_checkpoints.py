"""Whatever is changed in a checkpoint is refused with one sentence, before anything is loaded and on every rank."""

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from checkpoint.forged import Evil, forge, load_state, save_state, some_state
from motet.checkpoint import loading, verification
from motet.checkpoint.manifest import CheckpointManifest, SavedBy
from motet.checkpoint.tensor_index import StoredChunk, have_overlap, read_checkpoint
from motet.checkpoint.verification import checkpoint_verdicts, verify_files
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from refusals import refused


def _verify(where: Path) -> None:
    verify_files(where, *read_checkpoint(where))


def test_any_byte_that_changes_is_noticed(tmp_path: Path) -> None:
    where, draw = save_state(tmp_path, 4, {"w": torch.ones(2)}), Random(0)
    _verify(where)
    for path in where.iterdir():
        content = path.read_bytes()
        spaces = len(content) - len(content.replace(b" " * 64, b""))  # Of the padding of a header, some are enough
        for i in range(len(content)):
            if content[i : i + 64] == b" " * 64 and spaces and i % 97:
                continue
            changed = bytearray(content)
            changed[i] ^= draw.randrange(1, 256)
            path.write_bytes(changed)
            refused(r"checkpoint .*step-00000004 is damaged \(.*\); remove it to use the one before it", _verify, where)
        for other in (content[:-1], content + b" ", content[1:], b""):
            path.write_bytes(other)
            refused("is damaged", _verify, where)
        path.write_bytes(content)
    _verify(where)


def _set(*keys: str, to: object) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def _chunk(name: str, **fields: object) -> Callable[[Any], None]:
    """Another value of some fields of the first chunk of a tensor."""
    order = ["offsets", "lengths", "file", "start", "size_bytes", "checksum"]
    return lambda content: [content[name][0].__setitem__(order.index(key), to) for key, to in fields.items()]


def _without(*keys: str) -> Callable[[Any], None]:
    return lambda content: [content.pop(key) for key in keys]


FORGED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("manifest.json", _set("step", to=5), "step = 5 must be that of the folder's name, step-00000004"),
    ("manifest.json", _set("step", to=-4), "step = -4 must be at least 0"),
    ("manifest.json", _set("step", to="4"), "step = '4' must be a whole number"),
    ("manifest.json", _set("step", to=True), "step = True must be a whole number"),
    ("manifest.json", _set("step", to=4.0), "step = 4.0 must be a whole number"),
    ("manifest.json", _set("step", to=10**40), "step = 1000.*0000 must be"),
    ("manifest.json", _set("step", to=None), "step = None must be a whole number"),
    ("manifest.json", _set("format", to=True), "format = True must be 3"),
    ("manifest.json", _set("format", to="2"), "format = '2' must be 3"),
    ("manifest.json", _set("format", to=-2), "format = -2 must be 3"),
    ("manifest.json", _without("format"), "format = None must be 3"),
    ("manifest.json", _without("format", "checksums"), "format = None must be 3"),
    ("manifest.json", _without("checksum"), "manifest.json has changed: its checksum is not None"),
    ("manifest.json", _without("step"), "manifest.json: step is missing"),
    ("manifest.json", _without("checksums"), "checksums must be of tensors.json .*; saved_by.json is not there"),
    ("manifest.json", _set("checksums", to={}), "saved_by.json is not there"),
    ("manifest.json", _set("checksums", "rank-00000.safetensors", to=1), "; rank-00000.safetensors is there"),
    ("manifest.json", _without("sizes"), "sizes must be of the other files; saved_by.json is not among them"),
    ("manifest.json", _set("sizes", "manifest.json", to=1), "sizes .*; manifest.json is among them"),
    ("manifest.json", _set("checksums", "../../x", to=1), r"'../../x' must be of letters"),
    ("manifest.json", _set("checksums", "saved_by.json", to="x"), "checksums.saved_by.json = 'x' must be a whole"),
    ("manifest.json", _set("checksums", "saved_by.json", to=2**32), "must be less than 4294967296"),
    ("manifest.json", _set("sizes", "rank-00000.safetensors", to=2**60), "must be at most"),
    ("manifest.json", _set("sizes", "rank-00000.safetensors", to=4153), "has 4154 bytes and had 4153"),
    ("manifest.json", _set("shapes", to=[1]), r"shapes = \[1\] must be a section with keys"),
    ("manifest.json", _set("shapes", "b", to=[-1]), "shapes.b.0 = -1 must be at least 0"),
    ("manifest.json", _set("shapes", "b", to="62"), "shapes.b = '62' must be a list"),
    ("manifest.json", _set("shapes", "b", to=[2**53] * 64), "must have at most 2\\^60 elements"),
    ("manifest.json", _set("shapes", "b", to=[1] * 65), "shapes.b = .* must have at most 64 entries"),
    ("manifest.json", _set("shapes", "", to=[]), "shapes. = '' must have at least 1 characters"),
    (
        "manifest.json",
        _set("shapes", "a/weight", to=[4, 2]),
        r"a/weight: the chunk of \(6, 2\) at \(0, 0\) is not",
    ),
    ("manifest.json", _set("shapes", "a/weight", to=[7, 2]), r"a/weight: 12 elements of \[7, 2\] are there"),
    ("manifest.json", _set("shapes", "extra", to=[3]), "'extra' must have a shape and a dtype"),
    ("manifest.json", _set("dtypes", to=None), "dtypes = None must be a section with keys"),
    ("manifest.json", _set("dtypes", "b", to="float23"), "dtypes.b = 'float23' must be a dtype that a checkpoint"),
    ("manifest.json", _set("dtypes", "b", to="complex128"), "b = 'complex128' must be a dtype that a checkpoint"),
    ("manifest.json", _set("dtypes", "b", to="float64"), r"b: size_bytes = 4 must be 8"),
    (
        "manifest.json",
        _set("dtypes", "b", to="int32"),
        "the header of rank-00000.safetensors is not that of its tensors",
    ),
    ("manifest.json", _set("data_fingerprint", to=5), "data_fingerprint = 5 must be a text"),
    ("manifest.json", _set("more", to=5), "more = 5 is not a known field there"),
    ("saved_by.json", _set("ranks", to=0), "saved_by.ranks = 0 must be at least 1"),
    ("saved_by.json", _set("outer", to={"steps": 1}), "saved_by.outer must have the number of replicas"),
    ("saved_by.json", _set("shapes", to={"b": []}), "'b' must have a shape and a dtype"),
    ("tensors.json", _set("b", to=[]), r"b: 0 elements of \[\] are there, and must be 1"),
    ("tensors.json", _without("b"), r"b: 0 elements of \[\] are there, and must be 1"),
    ("tensors.json", _set("more", to=[]), "'more' is not in the manifest"),
    ("tensors.json", _chunk("b", file="saved_by.json"), "must be in both the manifest and the index"),
    ("tensors.json", _chunk("b", file="../x"), "must be of letters"),
    ("tensors.json", _chunk("b", start=0), "must fill its 4154 bytes one after the other"),
    ("tensors.json", _chunk("b", start=-1), "must be at least 0"),
    ("tensors.json", _chunk("b", start=4145), "b: start = 4145 must be a multiple of 4"),
    ("tensors.json", _chunk("b", checksum=1), "rank-00000.safetensors has changed"),
    ("tensors.json", _chunk("b", checksum=-1), "must be at least 0"),
    ("tensors.json", _chunk("b", size_bytes=3), "b: size_bytes = 3 must be 4"),
    ("tensors.json", _chunk("b", size_bytes=2**60), "must be at most"),
    ("tensors.json", _chunk("c/half", offsets=[1]), r"c/half: the chunk of \(3,\) at \(1,\) is not inside \[3\]"),
    ("tensors.json", _chunk("c/half", offsets=[0, 0]), "c/half: a chunk has 1 dimensions, and the tensor 1|is not"),
    ("tensors.json", lambda c: c["b"].append(c["b"][0]), r"b: 2 elements of \[\] are there, and must be 1"),
    ("rank-00000.safetensors", lambda content: content + b"more", "must fill its 4158 bytes one after the other"),
    ("rank-00000.safetensors", lambda content: content[:-4], "must fill its 4150 bytes one after the other"),
    (
        "rank-00000.safetensors",
        lambda content: content[:4096].replace(b" ", b"\t", 1) + content[4096:],
        "the header of",
    ),
    ("rank-00000.safetensors", lambda content: b"\1" + content[1:], "the header of"),
]


@pytest.mark.parametrize(("changed", "change", "sentence"), FORGED)
def test_forged_fields_are_refused_by_name(
    tmp_path: Path, changed: str, change: Callable[[Any], Any], sentence: str
) -> None:
    """All checksums fit: only the description of the fields, and the files, can tell."""
    where, state = save_state(tmp_path, 4, some_state()), some_state(7.0)
    forge(where, changed, change)
    refused(f"step-00000004 is damaged .*({sentence}).*; remove it to use the one before it", load_state, where, state)
    assert all(tensor.eq(7.0).all() for tensor in state.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("format", "checksum", "sizes"), "no format number"),
        *((_set("format", to=i), f"format {i}") for i in (2, 4)),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_by_its_manifest_alone(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    """The oldest had no number of their format, and no checksum of the manifest; tensors were in a pickle."""
    where, state = save_state(tmp_path, 4, some_state()), some_state(7.0)
    forge(where, "manifest.json", change)
    for path in where.iterdir():
        if path.name != "manifest.json":
            path.unlink()
    sentence = (
        f"step-00000004 has {words}, so another version of motet saved it, and this version reads format 3 alone: "
        "resume with the version that saved it, or start in another run folder"
    )
    refused(sentence, load_state, where, state)
    (verdict,) = checkpoint_verdicts(where)
    assert verdict.problem is not None and sentence in verdict.problem
    assert all(tensor.eq(7.0).all() for tensor in state.values())


def test_elements_that_are_there_twice_are_not_taken_for_those_that_are_missing(tmp_path: Path) -> None:
    where = save_state(tmp_path, 4, {"w": torch.arange(4.0)})

    def overlap(content: Any) -> None:
        file = "rank-00000.safetensors"
        content["w"] = [[[0], [2], file, 4096, 8, 1], [[1], [2], file, 4104, 8, 1]]

    forge(where, "tensors.json", overlap)
    refused("w: an element is there twice", load_state, where, {"w": torch.zeros(4)})


@pytest.mark.parametrize("seed", range(30))
def test_boxes_overlap_if_an_element_is_in_two(seed: int) -> None:
    draw, counts = Random(seed), torch.zeros(5, 4, 3, dtype=torch.int)
    boxes = []
    for _ in range(draw.randint(1, 4)):
        offsets = tuple(draw.randrange(n) for n in counts.shape)
        lengths = tuple(draw.randint(1, n - at) for at, n in zip(offsets, counts.shape, strict=True))
        counts[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))] += 1
        boxes.append((offsets, lengths))
    assert have_overlap(boxes) == bool((counts > 1).any())
    assert not have_overlap([((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))])


def _link(where: Path) -> None:
    (where / "rank-00000.safetensors").unlink()
    (where / "rank-00000.safetensors").symlink_to("/dev/zero")


def _pipe(where: Path) -> None:
    (where / "manifest.json").unlink()
    os.mkfifo(where / "manifest.json")


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing manifest": (lambda w: (w / "manifest.json").unlink(), "manifest.json: No such file"),
    "a missing saved_by.json": (lambda w: (w / "saved_by.json").unlink(), "saved_by.json: No such file"),
    "missing tensors": (lambda w: (w / "rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
    "another file": (
        lambda w: (w / "rank-00001.safetensors").write_text(""),
        "'rank-00001.safetensors' is not in its manifest",
    ),
    "a pickle": (lambda w: (w / ".metadata").write_bytes(pickle.dumps(Evil())), "'.metadata' is not in its manifest"),
    "a manifest that is a pickle": (lambda w: (w / "manifest.json").write_bytes(pickle.dumps(Evil())), "is not JSON"),
    "a file that never ends": (_link, "rank-00000.safetensors is not a regular file"),
    "a pipe": (_pipe, "manifest.json is not a regular file"),
    "nesting": (lambda w: (w / "manifest.json").write_text("[" * 10**5), "nested too deeply"),
    "many digits": (lambda w: (w / "manifest.json").write_text('{"step": %s}' % ("9" * 5000)), "is not JSON: Exceeds"),
    "another type": (lambda w: (w / "manifest.json").write_text("[1]"), r"= \[1\] must be a section with keys"),
    "another encoding": (lambda w: (w / "manifest.json").write_bytes(b"\xff"), "is not JSON"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_files_that_do_not_belong_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(Evil, "folder", tmp_path / "pwned")
    where = save_state(tmp_path, 4, some_state())
    change, sentence = FOLDERS[case]
    change(where)
    refused(f"is damaged .*({sentence}).*; remove it to use the one before it", load_state, where, some_state())
    assert not Evil.folder.exists()


def _load_where_one_rank_sees_damage(group: RankGroup, where: Path) -> tuple[str, bool]:
    """Return what a rank says, and whether it read tensors."""
    read, verify = list[bool](), loading.verify_files

    def verify_here(*arguments: Any, **share: int) -> None:
        if group.rank == 1:
            raise InputError("this rank sees damage")
        verify(*arguments, **share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "verify_files", verify_here)
        patch.setattr(loading, "read_data_files", lambda *_, **__: read.append(True))
        try:
            load_state(where, some_state(), group)
        except InputError as error:
            return str(error), bool(read)
    return "", bool(read)


def test_no_rank_reads_before_all_have_verified(ranks: Ranks, tmp_path: Path) -> None:
    where = save_state(tmp_path, 4, some_state())
    assert ranks.run(3, _load_where_one_rank_sees_damage, where) == [("this rank sees damage", False)] * 3


@pytest.mark.parametrize("name", ["saved_by.json", "tensors.json"])
def test_a_rank_verifies_what_it_interprets_itself(tmp_path: Path, name: str) -> None:
    """Another rank may compare the checksum of that file later."""
    where = save_state(tmp_path, 4, some_state())
    path = where / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    refused(f"{name} has changed", read_checkpoint, where)


def test_a_checkpoint_of_another_user_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save_state(tmp_path, 4, some_state())

    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(where / "manifest.json"))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        sentence = r"cannot read checkpoint .* \(manifest.json: Permission denied\); make it readable for this user"
        refused(sentence, read_checkpoint, where)


@pytest.mark.parametrize("shares", [1, 2, 4, 50])
@pytest.mark.parametrize("span_bytes", [1, 60, 10**9])
def test_each_byte_is_verified_by_one_rank_and_the_bytes_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: int, span_bytes: int
) -> None:
    read, verify_span = list[tuple[int, Any]](), verification._verify_span
    monkeypatch.setattr(verification, "_SPAN_BYTES", span_bytes)
    where = save_state(tmp_path, 4, {f"t{i}": torch.ones(1 + i % 5) for i in range(20)})
    for share in range(shares):
        with monkeypatch.context() as patch:
            patch.setattr(
                verification, "_verify_span", lambda f, s, share=share: (read.append((share, s)), verify_span(f, s))
            )
            verify_files(where, *read_checkpoint(where), share=share, shares=shares)
    chunks = [chunk for _, span in read for chunk in span.chunks]
    assert sorted(chunk.start for chunk in chunks) == sorted({chunk.start for chunk in chunks}) and len(chunks) == 20
    assert [bool(span.header_boxes) for _, span in read if span.chunks[0].start == 4096] == [True]
    assert sum(bool(span.header_boxes) for _, span in read) == 1
    by_share = [sum(c.size_bytes for s, span in read for c in span.chunks if s == share) for share in range(shares)]
    assert sum(by_share) == 240 and max(by_share) <= 240 / shares + 20


def _read_where_one_rank_cannot(group: RankGroup, where: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(loading, "read_manifest", lambda folder: read_checkpoint(folder / "nowhere"))
        try:
            loading.read_shared_manifest(where, group.process_group)
        except InputError as error:
            return str(error)
    return ""


def test_a_manifest_that_one_rank_cannot_read_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    where = save_state(tmp_path, 4, some_state())
    (sentence,) = {*ranks.run(3, _read_where_one_rank_cannot, where)}
    assert "nowhere is damaged (manifest.json: No such file or directory)" in sentence


def _load_damaged(group: RankGroup, where: Path) -> str:
    try:
        load_state(where, some_state(), group)
    except InputError as error:
        return str(error)
    return ""


def test_every_rank_says_which_file_is_damaged(ranks: Ranks, tmp_path: Path) -> None:
    """There are more ranks than files."""
    where = save_state(tmp_path, 4, some_state())
    data = where / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-12] + bytes(12))
    (sentence,) = {*ranks.run(4, _load_damaged, where)}
    assert "rank-00000.safetensors has changed" in sentence


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_the_header_of_each_file_is_verified_once(shares: int) -> None:
    names = [f"t{i}" for i in range(6)]
    index = {name: [StoredChunk((0,), (1,), f"f{i // 2}", 4096 + i % 2 * 4, 4, 0)] for i, name in enumerate(names)}
    stored = CheckpointManifest(
        1, "", {name: [1] for name in names}, dict.fromkeys(names, "float32"), SavedBy(1, 1, "")
    )
    spans = [span for share in range(shares) for span in verification._spans(stored, index, share=share, shares=shares)]
    headers = [(span.file, [box.name for box in span.header_boxes]) for span in spans if span.header_boxes]
    assert headers == [("f0", names[:2]), ("f1", names[2:4]), ("f2", names[4:])]
