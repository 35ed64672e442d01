"""Proofs of splits and stages that were done before, one file for each, in the user's cache folder.

The name of a file is a digest of what the proof depends on, as `module_key` and `proof_of_job` collect it. Where they
cannot, nothing is kept. A file that is damaged or belongs to somebody else is the same as none. Torch is not imported
here.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

import motet
from motet.core.atomic_file import write_file_atomically

EARLIER_RUN = ", in an earlier run"  # The end of the description of a proof that is read


class StoredProof(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid")

    key: str
    checksum: str  # Of the sharding's text
    way: int  # What the model's check on tokens has found out
    sharding: str
    inventory: str = ""  # The tensors of the model, in a file of a job

    @staticmethod
    def of(key: str, sharding: str, *, way: int = 0, inventory: str = "") -> "StoredProof":
        """A proof with its checksum."""
        checksum = digest_of_texts(key, str(way), sharding, inventory)
        return StoredProof(key=key, checksum=checksum, way=way, sharding=sharding, inventory=inventory)

    @property
    def is_undamaged(self) -> bool:
        """Whether the content is the one that was written."""
        return self.checksum == digest_of_texts(self.key, str(self.way), self.sharding, self.inventory)


@dataclass(frozen=True)
class ProofCache:
    """The files of a folder, or none at all."""

    folder: Path | None

    def read(self, key: str) -> StoredProof | None:
        """The proof of a key, unless its file is absent, damaged, or another user's."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        try:
            if any(each.stat().st_uid != os.getuid() for each in (self.folder, path)):
                return None
            proof = StoredProof.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        return proof if proof.key == key and proof.is_undamaged else None

    def write(self, proof: StoredProof) -> None:
        """Keep a proof. A folder that cannot be written to is left alone: the proof is done again then."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid == os.getuid():
                write_file_atomically(self.folder / f"{proof.key}.json", proof.model_dump_json().encode())
        except OSError:
            return


def open_proof_cache() -> ProofCache:
    """The files of this user; none for a user without a home."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "")  # noqa: TID251  (the convention of all programs)
        folder = folder if folder.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return ProofCache(None)
    return ProofCache(folder / "motet/proofs" if folder.is_absolute() else None)


def digest_of_texts(*texts: str) -> str:
    """A digest that differs where a text, or the border between two, differs."""
    digest = hashlib.blake2b(digest_size=20)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return digest.hexdigest()


@cache
def digest_of_motet() -> str:
    """A digest of the version and of all source files of motet."""
    folder = Path(motet.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return digest_of_texts(
        motet.__version__, *(f"{file.relative_to(folder)}\n{file.read_text('utf-8')}" for file in files)
    )
