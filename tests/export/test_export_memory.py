"""An export holds pieces of tensors, and never a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from export.stored_models import OWN, built_with_random_values, hf_job, job_of, store
from live_storages import LiveStorages
from models.tiny_configs import TINY_CONFIGS
from motet.checkpoint.reader import open_checkpoint
from motet.export import stored_parameters
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.train.job import Job

pytest.importorskip("transformers")
SHARD = 400_000
LARGE = {**OWN, "hidden": 128, "ffn_hidden": 512, "vocab_size": 2000}


class StoragesWithMemory(LiveStorages):
    """Without those of the meta device."""

    def _keep(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and super()._keep(tensor)


def jobs(folder: Path) -> dict[str, Job]:
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1000}
    mixtral = {"model_type": "mixtral", **TINY_CONFIGS["mixtral"], **sizes}
    return {
        "decoder": job_of(LARGE, folder / "cache"),
        "merged": job_of({**LARGE, "adapters": {"rank": 2, "targets": ["*"]}}, folder / "cache"),
        "mixtral": hf_job(folder / "hf", mixtral),
    }


@pytest.mark.parametrize("kind", ["decoder", "merged", "mixtral"])
def test_peak_is_below_two_shards(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs(tmp_path)[kind]
    module = built_with_random_values(job)
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    largest = max(p.numel() * p.element_size() for p in module.parameters())
    checkpoint = store(job, module, tmp_path / "run")
    del module
    monkeypatch.setattr(stored_parameters, "PIECE_BYTES", SHARD // 4)
    with open_checkpoint(checkpoint) as opened, StoragesWithMemory([torch.empty(1)]) as live:
        size = export_to_hf(job, opened, tmp_path / "out", settings=ExportSettings(shard_bytes=SHARD), log=print)
    assert 0.9 * total < size <= total and total > 5 * SHARD and largest > SHARD
    assert 0 < live.peak < 2 * SHARD
