"""Tensor and pipeline parallelism that splits nothing, which the engine takes although no job may ask for it."""

from dataclasses import dataclass
from pathlib import Path

from motet.core.batch import Batch
from motet.parallel.layout import contributing_rows_of_rank
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.train.build import TrainingComponents, build_components
from motet.train.job import Job
from motet.train.replica_check.checker import LocalStepResult
from motet.train.step import MicroBatchLoop

UNSPLIT = {"tp": ModelSharding(), "pp": ModelSharding(stages=(range(0), range(2)))}  # Stage 1 has everything


@dataclass(frozen=True)
class LastStageLoop(MicroBatchLoop):
    """Computes everything on the rank that holds the parameters; the other stage counts the tokens that it reads."""

    def run(self, step: int, *, keep_batches: bool) -> LocalStepResult:
        if self.engine.optimizer.sharded_parameters.engines:
            return super().run(step, keep_batches=keep_batches)
        parts = contributing_rows_of_rank(self.layout, self.engine.group.rank, self.batch_sequences)
        batches: list[Batch] = [self.batch_source.batch(step, rows) for rows in parts]
        tokens = sum(batch.tokens.numel() for batch in batches)
        return LocalStepResult([7.0], 7.0, tokens, batches, 7.0)  # a loss and targets that must not count


def build_unsplit(job: Job, group: RankGroup, folder: Path) -> tuple[TrainingComponents, LastStageLoop]:
    """The components of a run on this rank, and the runner of its steps."""
    parts = build_components(job, group, folder, model_sharding=UNSPLIT["pp" if job.layout.pp > 1 else "tp"])
    return parts, LastStageLoop(*vars(parts.make_runner(job)).values())
