"""`run.reproducible = "layout"`: losses, norms and parameters have the same bits in every layout."""

from pathlib import Path

import pytest
import torch

from motet.train.job import Job
from ranks import Ranks
from train.runs import Trained, small_job, train

REPRODUCIBLE = "run.reproducible=layout"
STEPS = 5


def job_of(folder: Path, zero: int, *changes: str, model: str = "decoder") -> Job:
    several = ["communication.bucket_mib=0.02", "communication.first_bucket_mib=0.01"] if zero < 3 else []
    precise = [REPRODUCIBLE, "precision.recipe=fp32", f"layout.zero={zero}"]
    return small_job(folder, *precise, *several, *changes, model=model)


def unlike(a: Trained, b: Trained) -> list[str]:
    """What differs in any bit."""
    numbers = [name for name in ("losses", "norms") if getattr(a, name) != getattr(b, name)]
    assert a.parameters.keys() == b.parameters.keys()
    return numbers + [n for n, p in a.parameters.items() if not torch.equal(p, b.parameters[n])]


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_layout(ranks: Ranks, tmp_path: Path, dp: int, zero: int) -> None:
    for batch in (12, 10):
        b = f"data.batch_sequences={batch}"
        whole = ranks.run(1, train, job_of(tmp_path, 0, b), STEPS)[0]
        for trained in ranks.run(dp, train, job_of(tmp_path, zero, b), STEPS):
            assert not unlike(trained, whole)
