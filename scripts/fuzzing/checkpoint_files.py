"""The files of checkpoints: flipped, cut, deleted, exchanged between steps, forged with fitted checksums, and pickles.

motet must refuse a changed file. A forged file whose checksums fit is loaded exactly as forged. Pickles that would
create a file stand where motet reads JSON or tensors; none may run.
"""

import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from fuzzing import checkpoint_truth as truth
from fuzzing import mutations
from fuzzing.cases import FuzzCase, FuzzTarget

DATA_FILES = truth.DATA_FILES
HUGE_BYTES = 1 << 40


class CheckpointFileTarget(FuzzTarget):
    """The files that hold the tensors, and files in their place."""

    name: ClassVar[str] = "checkpoint-files"
    first_check: ClassVar[str] = (
        "the folder holds the files of its manifest, each a regular file with its size and checksum"
    )
    first_refusals: ClassVar[str] = (
        r"has changed|is missing|is not in its manifest|is not a regular file|has \d+ bytes and had|is not JSON|"
        r"is not that of its tensors|"
        r"must be that of the folder's name|Is a directory|No such file"
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        truth.save_steps(folder)
        self.base = folder / "steps" / f"step-{truth.STEP:08d}"
        self.other = folder / "steps" / f"step-{truth.STEP - 1:08d}"
        self.pickles = planted_pickles(self.canary)
        self.structured: tuple[Callable[[FuzzCase, Path], None], ...] = (
            self._forge_data,
            self._forge_data,
            self._exchange,
            self._replace,
            self._plant,
            self._plant,
        )

    def run(self, case: FuzzCase) -> None:
        scratch = self.folder / "case"
        scratch.mkdir()
        try:
            folder = truth.copy_checkpoint(self.base, scratch / self.base.name)
            if case.is_structured:
                case.rng.choice(self.structured)(case, folder)
            else:
                path = folder / case.rng.choice(DATA_FILES)
                content, change = mutations.change_bytes(case.rng, path.read_bytes())
                path.write_bytes(content)
                case.note(f"{path.name}: {change}")
            (folder,) = scratch.iterdir()
            truth.check_load(folder, truth.true_state(folder))
        finally:
            shutil.rmtree(scratch)

    def _forge_data(self, case: FuzzCase, folder: Path) -> None:
        path = folder / case.rng.choice(DATA_FILES)
        content = path.read_bytes()
        first = truth.PAGE * (case.rng.random() < 0.8)
        changed, change = mutations.change_bytes(case.rng, content[first:])
        content = content[:first] + changed
        if case.rng.random() < 0.6:  # The same length, so that only the values are new
            length = len(path.read_bytes())
            content = content[:length].ljust(length, b"\0")
            change += "; of the same length"
        path.write_bytes(content)
        truth.fit_boxes(folder)
        truth.fit_checksums(folder)
        case.note(f"{path.name}: {change}; checksums fitted")

    def _exchange(self, case: FuzzCase, folder: Path) -> None:
        """Files of another step, of another file, or the complete folder under the name of another step."""
        rng = case.rng
        match kind := rng.choice(
            ("a file of another step", "two files", "the name of the folder", "all but the manifest")
        ):
            case "a file of another step":
                shutil.copy(self.other / DATA_FILES[0], folder / rng.choice(DATA_FILES))
            case "two files":
                first, second = (folder / name for name in DATA_FILES)
                content = first.read_bytes()
                first.write_bytes(second.read_bytes())
                second.write_bytes(content)
            case "the name of the folder":
                folder = folder.rename(
                    folder.with_name(rng.choice(("step-00000005", "step-00000003", "step-10000004")))
                )
            case _:
                for path in self.other.iterdir():
                    if path.name != truth.MANIFEST:
                        shutil.copy(path, folder / path.name)
        if rng.random() < 0.4:
            truth.fit_boxes(folder)
            truth.fit_checksums(folder)
            kind += "; checksums fitted"
        case.note(f"exchanged: {kind}")

    def _replace(self, case: FuzzCase, folder: Path) -> None:
        """Put something else in place of a regular file with the saved content."""
        rng = case.rng
        path = folder / rng.choice((*DATA_FILES, truth.TENSORS, truth.SAVED_BY, truth.MANIFEST))
        match kind := rng.choice(
            ("nothing", "a folder", "a pipe", "/dev/zero", "a link", "a huge file", "one more file")
        ):
            case "nothing":
                path.unlink()
            case "a folder":
                path.unlink()
                path.mkdir()
            case "a pipe":
                path.unlink()
                os.mkfifo(path)
            case "/dev/zero":
                path.unlink()
                path.symlink_to("/dev/zero")
            case "a link":
                target = self.folder / "linked"
                target.write_bytes(path.read_bytes())
                path.unlink()
                path.symlink_to(target)
            case "a huge file":
                os.truncate(path, HUGE_BYTES)
            case _:
                (folder / rng.choice((".metadata", "rank-00002.safetensors", "\udcff", "a\nb"))).write_bytes(b"x")
        if rng.random() < 0.3 and kind not in ("a huge file", "/dev/zero", "a pipe") and path.name != truth.MANIFEST:
            truth.fit_checksums(folder)
            kind += "; checksums fitted"
        case.note(f"in place of {path.name}: {kind}")

    def _plant(self, case: FuzzCase, folder: Path) -> None:
        name = case.rng.choice((*DATA_FILES, truth.TENSORS, truth.SAVED_BY, truth.METADATA, truth.MANIFEST))
        content, words = self._pickle(case)
        (folder / name).write_bytes(content)
        if name != truth.MANIFEST and case.rng.random() < 0.8:
            truth.fit_checksums(folder)
            words += "; checksums fitted"
        case.note(f"{name} is {words}")

    def _pickle(self, case: FuzzCase) -> tuple[bytes, str]:
        words = case.rng.choice(list(self.pickles))
        return self.pickles[words], words


def planted_pickles(canary: Path) -> dict[str, bytes]:
    """Pickles, and archives with pickles, that create a file when they are read without care."""
    command = f"touch {canary}"

    class Planted:
        def __reduce__(self) -> Any:
            return os.system, (command,)

    text = command.encode()
    short = bytes([len(text)]) if len(text) < 256 else b"\xff"
    by_hand = b"\x80\x02cos\nsystem\n" + b"U" + short + text + b"\x85R."
    stack_global = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + short + text + b"\x85R."
    builtin = b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c" + _short_text(f"open({str(canary)!r}, 'w')") + b"\x85R."
    planted = {f"a pickle of protocol {number}": pickle.dumps(Planted(), number) for number in range(6)}
    planted |= {"os.system": by_hand, "os.system from the stack": stack_global, "eval": builtin}
    planted["a pickle in a class of torch"] = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}U\x13state_dict_metadata"
        + by_hand[2:-1]
        + b"sb."
    )
    planted["a pickle with a reference of 2 GiB"] = b"\x80\x02" + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01."
    planted["a pickle of nested tuples"] = b"\x80\x02)" + b"\x85" * 100_000 + b"."
    planted["a pickle of nested lists"] = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    planted["a pickle with a memo of 2^32"] = b"\x80\x02]r\xff\xff\xff\xff."
    planted["a pickle that never ends"] = b"\x80\x02"
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", by_hand)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return planted | {"an archive of torch with a pickle": archive.getvalue()}


def _short_text(text: str) -> bytes:
    content = text.encode()[:255]
    return bytes([len(content)]) + content
