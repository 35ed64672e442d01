"""Proofs of splits and stages that were done before, one file for each, in the user's cache folder.

The name of a file is a digest of the inputs of a proof, as `module_key` and `proof_of_job` collect them. Where they
cannot, no proof is kept. A file that is damaged or belongs to another user counts as absent. Torch is not imported
here.

The proven split of a job in an earlier run, with the tensors of its model: neither torch nor the model is needed.

It is kept for models that motet or transformers make from settings. Any other module depends on code that is not known
before it has run.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

import motet
from motet.core.text_files import write_file_atomically
from motet.core.user_cache import user_cache_folder
from motet.models.settings import UserModuleSettings
from motet.parallel.layout import Layout
from motet.parallel.model_sharding import PIPELINE_DIMENSION, ModelInventory, ModelSharding
from motet.train.job import Job
from motet.train.proof.followed_sources import file_stats, installed_packages

EARLIER_RUN = ", in an earlier run"  # The end of the description of a proof that is read


class StoredProof(BaseModel):
    """The content of a file."""

    model_config = ConfigDict(extra="forbid")

    key: str
    checksum: str  # Checksum of the sharding's text
    way: int  # The result of the model's check on tokens
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
    """The proofs in a folder; without a folder it keeps none."""

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
    """The cache of this user; for a user without a home it keeps no proofs."""
    folder = user_cache_folder()
    return ProofCache(None if folder is None else folder / "proofs")


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


def read_proof_of_job(job: Job, layout: Layout) -> tuple[ModelInventory, ModelSharding] | None:
    """The tensors and the split of a job's model, if a run with the same job has kept them."""
    key = _job_key(job, layout)
    if key is None or (known := open_proof_cache().read(key)) is None:
        return None
    sharding = TypeAdapter(ModelSharding).validate_json(known.sharding)
    inventory = TypeAdapter(ModelInventory).validate_json(known.inventory)
    return inventory, replace(sharding, proof=sharding.proof + EARLIER_RUN)


def keep_proof_of_job(job: Job, layout: Layout, *, inventory: ModelInventory, sharding: ModelSharding) -> None:
    """Keep a split that was proven with the same job, unless the proof was that of a small model, which is quick."""
    if sharding.proof and (key := _job_key(job, layout)) is not None:
        proven = replace(sharding, proof=sharding.proof.removesuffix(EARLIER_RUN))
        texts = [
            TypeAdapter(kind).dump_json(value).decode()
            for kind, value in ((ModelSharding, proven), (ModelInventory, inventory))
        ]
        open_proof_cache().write(StoredProof.of(key, texts[0], inventory=texts[1]))


def _job_key(job: Job, layout: Layout) -> str | None:
    """A digest of everything that the model of a job and its split depend on; None if code of the user makes it."""
    is_split_by_stages = layout.dims.size(PIPELINE_DIMENSION) > 1  # A schedule may be a file
    stages = layout.pipeline_schedule(layout.sharding.microbatches).stage_ranks if is_split_by_stages else ()
    settings = ["job", job.model_dump(mode="json"), layout.dims.sizes, stages, sys.version, installed_packages()]
    if isinstance(job.model, UserModuleSettings):
        if job.model.hf_path is None or (spec := find_spec("transformers")) is None or spec.origin is None:
            return None
        place = Path(job.model.hf_path).expanduser().resolve()
        config = place / "config.json" if place.is_dir() else place
        try:
            settings += [str(place), config.read_bytes().hex(), [*file_stats(place.glob("*"))]]
            settings += [[*file_stats(Path(spec.origin).parent.rglob("*.py"))]]
        except OSError:  # The model is refused where it is built
            return None
    return digest_of_texts(json.dumps(settings, sort_keys=True, default=str), digest_of_motet())
