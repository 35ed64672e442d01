"""Recomputation changes what is kept and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from train.runs import same_bits, small_job, train, worst_difference

SINGLE = RankGroup(0, 1, None, torch.device("cpu"))
POLICIES = ["memory.recompute=full", "memory.recompute=selective", "memory.recompute=every-k"]
STEPS = 3


@pytest.mark.parametrize("model", ["decoder", "bert", "t5", "gpt2"])
def test_one_rank_has_the_same_bits(tmp_path: Path, model: str) -> None:
    for dropout in (0.0, 0.1):
        for precision in ("fp32", "bf16"):
            settings = ["layout.microbatches=2", f"precision.recipe={precision}"]
            settings += [f"model.dropout={dropout}"] if model != "gpt2" else []
            job = small_job(tmp_path, *settings, model=model)
            expected = train(SINGLE, job, STEPS)
            for policy in POLICIES:
                recomputed = train(SINGLE, small_job(tmp_path, *settings, policy, model=model), STEPS)
                assert recomputed.losses == expected.losses, (policy, dropout, precision)
                assert same_bits(recomputed.masters, expected.masters), (policy, dropout, precision)
