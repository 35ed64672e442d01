"""A step that is recorded computes the same bits as one that is not, and records what its ranks give to reductions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from motet.parallel.process.process_group import RankGroup
from motet.parity.record.record_verification_steps import run_recorded_step
from motet.parity.record.tensor_recorder import TensorRecorder
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.job import Job
from ranks import Ranks
from train.runs import small_job

STEPS = 2


def masters(group: RankGroup, job: Job, folder: Path, is_recorded: bool) -> tuple[list[Tensor], set[str]]:
    """The masters of a rank after some steps, and the kinds of what was recorded."""
    subject, kinds = JobVerificationSubject(job), set[str]()
    with subject.numerics():
        on_rank = subject.build(group, folder)
        for step in range(STEPS):
            if is_recorded:
                kinds |= {record.kind for record in run_recorded_step(on_rank, step)}
            else:
                on_rank.step(step, TensorRecorder())
        on_rank.engine.synchronize()
        return [each.clone() for each in on_rank.engine.optimizer.sharded_parameters.local_masters], kinds


@pytest.mark.parametrize(
    "settings",
    [
        ("layout.zero=0",),
        ("layout.zero=2", "layout.microbatches=2", "communication.overlap=none"),
        ("layout.zero=1", "communication.overlap=forward"),
        ("layout.zero=3", "layout.microbatches=2"),
        ("layout.zero=3", "run.reproducible=layout", "data.batch_sequences=5"),
        ("layout.zero=2", "communication.compress_gradients=int8"),
    ],
)
def test_the_same_bits(ranks: Ranks, tmp_path: Path, settings: tuple[str, ...]) -> None:
    job = small_job(tmp_path, "layout.dp=2", "precision.recipe=fp32", *settings)
    plain, recorded = (ranks.run(2, masters, job, tmp_path, each) for each in (False, True))
    for (wanted, _), (found, kinds) in zip(plain, recorded, strict=True):
        assert len(wanted) == len(found) and all(map(torch.equal, wanted, found))
        assert {"local gradient", "gradient", "used parameter", "activation gradient"} <= kinds
