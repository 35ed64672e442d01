"""A proven split is kept with its job, and shown again without torch, until anything that it depends on has changed."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from motet.parallel.layout import Layout
from motet.parallel.model_sharding import DimensionSplit, ModelInventory, ModelSharding, ShardRule, TensorInfo
from motet.train.job import Job, load_job
from motet.train.job_step_plan import step_plan_of_split_job
from motet.train.launch.preflight import check_job
from motet.train.proof import proof_cache, proposed_sharding
from motet.train.proof.proof_cache import EARLIER_RUN, keep_proof_of_job, read_proof_of_job

_INVENTORY = ModelInventory((TensorInfo("head.weight", (8, 4), "float32", "trained", aliases=("embedding.weight",)),))
_SHARDING = ModelSharding(
    rules={"head.weight": ShardRule((DimensionSplit(0, "tp"),), reason="columns")}, proof="proven"
)
_CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_JOB = """
model.factory = "hf:{folder}"
data = {{source = "stdlib", tokenizer = "bytes", sequence_length = 16}}
run.steps = 1
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of a Hugging Face config, with a package in place of transformers, and an empty cache of proofs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("config", "transformers/models", "installed/torch-2.13.0.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "config/config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "transformers/models/llama.py").write_text("norm = 1")
    (tmp_path / "job.toml").write_text(_JOB.format(folder=tmp_path / "config"))
    spec = ModuleSpec("transformers", None, origin=str(tmp_path / "transformers/__init__.py"))
    monkeypatch.setattr(proof_cache, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    return tmp_path / "job.toml"


def _job(file: Path, *overrides: str) -> tuple[Job, Layout]:
    job = load_job(str(file), ["layout.dp=1", "layout.tp=2", *overrides])
    return job, job.layout_for(job.layout.dims.ranks)


def test_the_order_of_pythons_folders_does_not_matter(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_proof_of_job(*_job(job_file), inventory=_INVENTORY, sharding=_SHARDING)
    monkeypatch.setattr(sys, "path", [*reversed(sys.path), *sys.path])
    assert read_proof_of_job(*_job(job_file)) is not None


def test_what_is_read_is_what_was_kept(job_file: Path) -> None:
    assert read_proof_of_job(*_job(job_file)) is None
    keep_proof_of_job(*_job(job_file), inventory=_INVENTORY, sharding=_SHARDING)
    read = read_proof_of_job(*_job(job_file))
    assert read is not None and read == (_INVENTORY, replace(_SHARDING, proof="proven" + EARLIER_RUN))
    keep_proof_of_job(
        *_job(job_file), inventory=read[0], sharding=read[1]
    )  # As after a proof that was kept for a module
    assert read_proof_of_job(*_job(job_file)) == read


def _write(path: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)

    return change


_CHANGES = {
    "a size": _write("config/config.json", json.dumps({**_CONFIG, "num_hidden_layers": 3})),
    "weights": _write("config/model.safetensors", "weights"),
    "code of transformers": _write("transformers/models/llama.py", "norm = 10"),
    "new code of transformers": _write("transformers/models/other.py", ""),
    "a package": _write("installed/kernels-1.0.dist-info/METADATA", ""),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_another_model_or_library_is_another_proof(job_file: Path, change: Callable[[Path], None]) -> None:
    keep_proof_of_job(*_job(job_file), inventory=_INVENTORY, sharding=_SHARDING)
    assert read_proof_of_job(*_job(job_file)) is not None
    change(job_file.parent)
    assert read_proof_of_job(*_job(job_file)) is None


@pytest.mark.parametrize(
    "override",
    ["layout.tp=4", "layout.sp=true", "model.arguments.num_hidden_layers=4", "precision.recipe=fp64"],
)
def test_another_setting_is_another_proof(job_file: Path, override: str) -> None:
    keep_proof_of_job(*_job(job_file), inventory=_INVENTORY, sharding=_SHARDING)
    assert read_proof_of_job(*_job(job_file, override)) is None


def test_another_version_of_motet_or_python_is_another_proof(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_proof_of_job(*_job(job_file), inventory=_INVENTORY, sharding=_SHARDING)
    with monkeypatch.context() as patch:
        patch.setattr(proof_cache, "digest_of_motet", lambda: "other source files")
        assert read_proof_of_job(*_job(job_file)) is None
    monkeypatch.setattr(sys, "version", "3.99")
    assert read_proof_of_job(*_job(job_file)) is None


def test_a_schedule_of_a_file_counts_by_its_content(job_file: Path) -> None:
    file, lines = job_file.parent / "schedule.csv", ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    settings = ["layout.tp=1", "layout.pp=2", "layout.microbatches=2", f"layout.schedule={file}"]
    file.write_text("\n".join(lines))
    keep_proof_of_job(*_job(job_file, *settings), inventory=_INVENTORY, sharding=_SHARDING)
    assert read_proof_of_job(*_job(job_file, *settings)) is not None
    file.write_text("\n".join(reversed(lines)))  # The first stage is on the second rank
    assert read_proof_of_job(*_job(job_file, *settings)) is None


@pytest.mark.parametrize("kind", ["own code", "no config", "damaged", "quick"])
def test_nothing_is_kept_of_unknown_code_or_quick_proofs_or_read_if_damaged(job_file: Path, kind: str) -> None:
    sharding = replace(_SHARDING, proof="") if kind == "quick" else _SHARDING
    factory = {"own code": "models:Net", "no config": "hf:nowhere"}.get(kind)
    settings = [f"model.factory={factory}"] if factory else []
    keep_proof_of_job(*_job(job_file, *settings), inventory=_INVENTORY, sharding=sharding)
    folder = job_file.parent / "home/.cache/motet/proofs"
    if kind == "damaged":
        (file,) = folder.iterdir()
        file.write_text(file.read_text().replace("head.weight", "tail.weight", 1))
    else:
        assert not folder.exists()
    assert read_proof_of_job(*_job(job_file, *settings)) is None


def test_a_large_model_is_shown_again_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = load_job("gpt2-124m", ["layout.dp=1", "layout.tp=2"])
    first = step_plan_of_split_job(job, check_job(job, 2))
    monkeypatch.setattr(proposed_sharding, "sharding_of_job", None)
    again = step_plan_of_split_job(job, check_job(job, 2))
    assert again.inventory == first.inventory and again.groups == first.groups
    assert again.model_sharding == replace(first.model_sharding, proof=first.model_sharding.proof + EARLIER_RUN)
    code = """
import sys
from motet.cli.main import app
app(["show", "layout", "dp=1 tp=2", "--job", "gpt2-124m"], standalone_mode=False)
print(*sorted({"torch", "numpy", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, proof, loaded = done.stdout.split("\n")[:-1]
    assert proof.endswith(f"{EARLIER_RUN}.") and loaded == ""
