"""Folders of torch's Distributed Checkpoint: metadata and data that are flipped, cut, exchanged, forged, and pickles.

motet must refuse a folder, or import the tensors that torch itself reads from it. Pickles that would create a file
stand where motet reads metadata or tensors; none may run.
"""

import contextlib
import io
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, FuzzTarget
from fuzzing.checkpoint_files import planted_pickles
from fuzzing.checkpoint_truth import make_state, same_bits
from motet.checkpoint.reader import open_checkpoint
from motet.checkpoint.tools.dcp_import import DcpBoxReader, manifest_of_dcp, open_dcp
from motet.checkpoint.tools.rewriting import write_checkpoint
from motet.checkpoint.verification import checkpoint_verdicts
from motet.core.new_folders import new_folder

METADATA, DATA = ".metadata", "__0_0.distcp"


class DcpFolderTarget(FuzzTarget):
    """A folder with a module and its moments."""

    name: ClassVar[str] = "dcp-folders"
    first_check: ClassVar[str] = "the metadata is a pickle of data alone, as torch writes it"
    first_refusals: ClassVar[str] = r"is not what torch writes|does not belong there|No such file|is not a regular file"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.base = folder / "base"
        state = {name.partition("/")[2]: tensor for name, tensor in make_state(0).items()}
        moments = {"exp_avg": torch.ones(11, 4), "step": torch.tensor(4.0)}
        nested = {"model": state, "optimizer": {"state": {"embedding.weight": moments}, "param_groups": [{"lr": 0.1}]}}
        with _quiet():
            dcp.save(nested, checkpoint_id=self.base, no_dist=True)
        self.metadata = (self.base / METADATA).read_bytes()
        self.pickles = planted_pickles(self.canary)

    def run(self, case: FuzzCase) -> None:
        scratch = self.folder / "case"
        folder = Path(shutil.copytree(self.base, scratch / "dcp"))
        try:
            is_safe = self._change(case, folder) or (folder / METADATA).read_bytes() == self.metadata
            self._check_import(folder, scratch / "run", is_safe=is_safe)
        finally:
            shutil.rmtree(scratch)

    def _change(self, case: FuzzCase, folder: Path) -> bool:
        """Change a folder. Returns whether its metadata are those of torch, which torch may read as well."""
        if not case.is_structured:
            path = folder / case.rng.choice((METADATA, METADATA, DATA))
            content, change = mutations.change_bytes(case.rng, path.read_bytes())
            path.write_bytes(content)
            case.note(f"{path.name}: {change}")
            return False
        if case.rng.random() < 0.2:
            words = case.rng.choice(list(self.pickles))
            name = case.rng.choice((METADATA, DATA))
            (folder / name).write_bytes(self.pickles[words])
            case.note(f"{name} is {words}")
            return name == DATA
        metadata = pickle.loads(self.metadata)  # It is ours
        for _ in range(case.rng.choice((1, 1, 2))):
            case.note(_change_metadata(case, metadata))
        (folder / METADATA).write_bytes(pickle.dumps(metadata, case.rng.choice((4, 4, 5))))
        return True

    def _check_import(self, folder: Path, out: Path, *, is_safe: bool) -> None:
        source = open_dcp(folder)
        manifest = manifest_of_dcp(source, step=None, like=None)
        with new_folder(out, manifest.size_bytes) as unfinished:
            read = DcpBoxReader(source, manifest.dtypes)
            path = write_checkpoint(unfinished, manifest, read, report=lambda _: None, stored_boxes=source.boxes)
        path = out / path.name
        (verdict,) = checkpoint_verdicts(path)
        if verdict.problem:
            raise FindingError(f"the imported checkpoint is not whole: {verdict.problem}")
        if not is_safe:
            return
        checkpoint = open_checkpoint(path)
        state = {
            key: torch.zeros(checkpoint.shape(name), dtype=checkpoint.dtype(name)) for key, name in _keys(checkpoint)
        }
        with _quiet():
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        for key, name in _keys(checkpoint):
            if not same_bits(state[key], checkpoint[name]):
                raise FindingError(
                    f"{name} was imported as {checkpoint[name].tolist()!s:.200}, and is {state[key]!s:.200}"
                )


def _keys(checkpoint: Any) -> list[tuple[str, str]]:
    """Torch's key of each tensor that is stored, and its name in the checkpoint."""
    kinds = {"master": "model.", "frozen": "model.", "buffer": "model."}
    named = [(name, *name.partition("/")[::2]) for name in checkpoint.names if "/" in name]
    return [
        (f"{kinds[kind]}{rest}" if kind in kinds else f"optimizer.state.{rest}.{kind}", name)
        for name, kind, rest in named
    ]


@contextlib.contextmanager
def _quiet() -> Any:
    """Silence what torch says of a single process."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _change_metadata(case: FuzzCase, metadata: Any) -> str:
    """Change one field as a forger would, so that the file is still one that torch could have written."""
    rng = case.rng
    tensors = [each for each in metadata.state_dict_metadata.values() if hasattr(each, "chunks")]
    tensor, place = rng.choice(tensors), rng.choice(list(metadata.storage_data.values()))
    key = rng.choice(list(metadata.storage_data))
    changes: dict[str, Callable[[], object]] = {
        "size": lambda: setattr(tensor, "size", _other_size(rng, tensor.size)),
        "dtype": lambda: setattr(
            tensor.properties, "dtype", rng.choice((torch.int32, torch.float16, torch.complex128, torch.bool))
        ),
        "chunk sizes": lambda: [setattr(c, "sizes", _other_size(rng, c.sizes)) for c in tensor.chunks],
        "chunk offsets": lambda: [setattr(c, "offsets", _other_size(rng, c.offsets)) for c in tensor.chunks],
        "no chunk": lambda: tensor.chunks.clear(),
        "two chunks": lambda: tensor.chunks.extend(tensor.chunks[:1]),
        "file": lambda: setattr(
            place, "relative_path", rng.choice(("../base/" + DATA, "/dev/zero", "x", "", METADATA))
        ),
        "offset": lambda: setattr(place, "offset", place.offset + rng.choice((-1, 1, 64, 10**9, -(10**9)))),
        "length": lambda: setattr(place, "length", rng.choice((0, -1, 1, place.length - 1, place.length + 1, 2**62))),
        "no place": lambda: metadata.storage_data.pop(key, None),
        "extension": lambda: setattr(place, "transform_descriptors", ["stream.zstd"]),
        "no tensor": lambda: metadata.state_dict_metadata.pop(key.fqn, None),
        "other fields": lambda: setattr(metadata, "planner_data", mutations.other_value(rng, {"a": 1})),
    }
    change = rng.choice(list(changes))
    changes[change]()
    return f"{change} changed"


def _other_size(rng: Any, size: torch.Size) -> torch.Size:
    lengths = [max(0, length + rng.choice((-1, 0, 1, 7))) for length in size]
    return torch.Size([*lengths, 1] if rng.random() < 0.1 else lengths)
