"""Tensor parallelism that splits nothing, which the engine takes although no job may ask for it."""

from pathlib import Path

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, build_components
from motet.train.job import Job
from motet.train.step import MicroBatchLoop


def build_unsplit(job: Job, group: RankGroup, folder: Path) -> tuple[TrainingComponents, MicroBatchLoop]:
    """The components of a run on this rank, and the runner of its steps."""
    parts = build_components(job, group, folder, model_sharding=ModelSharding())
    return parts, parts.make_runner(job)
