"""The proven split of a job in an earlier run, with the tensors of its model: neither torch nor the model is needed.

It is kept for models that motet or transformers make from settings. Any other module depends on code that is not known
before it has run.
"""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pydantic import TypeAdapter

from motet.models.settings import UserModuleSettings
from motet.parallel.layout import Layout
from motet.parallel.model_inventory import ModelInventory
from motet.parallel.model_sharding import PIPELINE_DIMENSION, ModelSharding
from motet.train.job import Job
from motet.train.proof.followed_sources import file_stats, installed_packages
from motet.train.proof.proof_cache import (
    EARLIER_RUN,
    StoredProof,
    digest_of_motet,
    digest_of_texts,
    open_proof_cache,
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
