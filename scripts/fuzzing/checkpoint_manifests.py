"""The JSON of checkpoints: manifest.json, saved_by.json and tensors.json, with checksums that fit and without.

A text that was changed without its checksum must be refused. One whose checksums all fit is loaded exactly as it says,
or refused; the truth decides which tensors that are.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

from fuzzing import checkpoint_truth as truth
from fuzzing import mutations
from fuzzing.cases import FuzzCase, FuzzTarget

FILES = (truth.MANIFEST, truth.MANIFEST, truth.SAVED_BY, truth.TENSORS)


class ManifestTarget(FuzzTarget):
    """The description of a checkpoint in its own folder."""

    name: ClassVar[str] = "checkpoint-manifests"
    first_check: ClassVar[str] = "the manifest is JSON with the checksum of itself, and the file has the checksum in it"
    first_refusals: ClassVar[str] = r"is not JSON|has changed|nested too deeply|No such file"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        truth.save_steps(folder)
        self.base = folder / "steps" / f"step-{truth.STEP:08d}"
        truth.check_load(self.base, truth.make_state(truth.STEP))

    def run(self, case: FuzzCase) -> None:
        scratch = self.folder / "case"
        scratch.mkdir()
        try:
            folder = truth.copy_checkpoint(self.base, scratch / self.base.name)
            self._change(case, folder)
            truth.check_load(folder, truth.true_state(folder))
        finally:
            shutil.rmtree(scratch)

    def _change(self, case: FuzzCase, folder: Path) -> None:
        path = folder / case.rng.choice(FILES)
        if not case.is_structured:
            content, change = mutations.change_bytes(case.rng, path.read_bytes())
            path.write_bytes(content)
            if case.rng.random() < 0.3 and path.name != truth.MANIFEST:
                truth.fit_checksums(folder)
                change += "; checksums fitted"
        else:
            tree, change = _changed(case, json.loads(path.read_text()), path.name)
            if path.name == truth.MANIFEST and case.rng.random() < 0.3:
                path.write_text(json.dumps(tree, indent=1))
            elif path.name == truth.MANIFEST:
                truth.write_manifest(folder, tree)
                change += "; checksums fitted"
            else:
                path.write_text(json.dumps(tree))
                if path.name == truth.TENSORS and case.rng.random() < 0.5:
                    truth.fit_boxes(folder)
                truth.fit_checksums(folder)
                change += "; checksums fitted"
        case.note(f"{path.name}: {change}")


def _changed(case: FuzzCase, tree: Any, name: str) -> tuple[Any, str]:
    """A tree with one change; half of those of tensors.json are of the places in the files."""
    rng = case.rng
    if name != truth.TENSORS or rng.random() < 0.5:
        return mutations.change_tree(rng, copy.deepcopy(tree))
    chunks = [chunk for each in tree.values() for chunk in each]
    chunk, other = rng.choice(chunks), rng.choice(chunks)
    match rng.choice(("place", "file", "exchange", "offset", "length", "repeat", "drop")):
        case "place":
            chunk[3] += rng.choice((-8, -1, 1, 8, 10**6, -(10**6)))
        case "file":
            chunk[2] = rng.choice(
                (truth.SAVED_BY, truth.MANIFEST, "../x", "/dev/zero", "rank-00009.safetensors", other[2])
            )
        case "exchange":
            chunk[2:4], other[2:4] = other[2:4], chunk[2:4]
        case "offset":
            chunk[0] = [at + rng.choice((-1, 0, 1)) for at in chunk[0]]
        case "length":
            chunk[1] = [max(0, length + rng.choice((-1, 0, 1))) for length in chunk[1]]
        case "repeat":
            rng.choice(list(tree.values())).append(copy.deepcopy(chunk))
        case "drop":
            rng.choice(list(tree.values())).pop()
    return tree, f"a chunk is {chunk}"
