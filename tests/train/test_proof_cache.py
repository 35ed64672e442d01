"""A proof is kept for later runs, and is no longer found when anything that it depends on has changed."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches, reload
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from motet.train.job import load_job
from motet.train.launch.preflight import check_job
from motet.train.proof import proposed_sharding
from motet.train.proof.module_key import proof_key
from motet.train.proof.proof_cache import ProofCache, StoredProof, open_proof_cache
from motet.train.proof.proposed_sharding import sharding_of_job

_FILES = {
    "proof_helper.py": "def scale(x):\n    return 2 * x\n",
    "proof_base.py": "from torch import nn\n\nclass Base(nn.Module):\n    factor = 1\n",
    "proof_model.py": (
        "from torch import nn\nfrom proof_base import Base\nfrom proof_helper import scale\n\n"
        "class Model(Base):\n    def __init__(self, width=4):\n        super().__init__()\n"
        "        self.layer = nn.Linear(width, width)\n\n    def forward(self, x):\n        "
        "return scale(self.layer(x))\n"
    ),
}


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the code of a model in three files, which can be imported."""
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in _FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def _module(name: str = "proof_model") -> ModuleType:
    return import_module(name)


def _model(width: int = 4) -> nn.Module:
    model: nn.Module = _module().Model(width)
    return model


def _change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    invalidate_caches()
    for each in _FILES:
        reload(import_module(each.removesuffix(".py")))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("proof_helper.py", "2 * x", "3 * x"),
        ("proof_base.py", "factor = 1", "factor = 2"),
        ("proof_model.py", "scale(self", "-scale(self"),
    ],
)
def test_another_code_is_another_proof(model_file: Path, name: str, old: str, new: str) -> None:
    before = proof_key(_model(), {"tp": 2})
    assert before == proof_key(_model(), {"tp": 2})
    _change(model_file, name, old, new)
    assert proof_key(_model(), {"tp": 2}) != before


def test_another_model_or_setting_is_another_proof(model_file: Path) -> None:
    keys = [proof_key(_model(), {"tp": 2}), proof_key(_model(), {"tp": 4}), proof_key(_model(8), {"tp": 2})]
    frozen, attribute = _model(), _model()
    frozen.layer.weight.requires_grad_(False)  # type: ignore[union-attr, operator]  # a parameter
    attribute.heads = 3
    keys += [proof_key(each, {"tp": 2}) for each in (frozen, attribute)]
    assert len(set(keys)) == len(keys)


def test_a_damaged_file_and_one_of_another_user_are_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, proof = ProofCache(tmp_path / "proofs"), StoredProof.of("key", '{"rules": {}}', way=1)
    assert cache.read("key") is None
    cache.write(proof)
    assert cache.read("key") == proof and cache.read("other") is None
    path = tmp_path / "proofs/key.json"
    undamaged = path.read_text()
    for damaged in (undamaged[:-4], undamaged.replace("rules", "ruled"), undamaged.replace('"way":1', '"way":0'), "[]"):
        path.write_text(damaged)
        assert cache.read("key") is None
    path.write_text(undamaged)
    (tmp_path / "proofs/copy.json").write_text(undamaged)
    assert cache.read("copy") is None
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    assert cache.read("key") is None


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "proofs").write_text("a file")
    ProofCache(tmp_path / "proofs").write(StoredProof.of("key", "{}"))
    assert (tmp_path / "proofs").read_text() == "a file"


def test_the_folder_is_that_of_the_user_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "a/relative/one")
    assert open_proof_cache().folder == tmp_path / "home/.cache/motet/proofs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert open_proof_cache().folder == tmp_path / "cache/motet/proofs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "not/absolute")
    assert open_proof_cache().folder is None
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # Of no user in passwd
    cache = open_proof_cache()
    cache.write(StoredProof.of("key", "{}"))
    assert cache.folder is None and cache.read("key") is None


def test_a_large_model_is_proven_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = load_job("gpt2-124m", ["layout.dp=1", "layout.tp=2"])
    layout = check_job(job, 2)
    _, sharding = sharding_of_job(job, layout)
    (file,) = (tmp_path / ".cache/motet/proofs").iterdir()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it is proven again")

    proven = proposed_sharding._proven
    monkeypatch.setattr(proposed_sharding, "_proven", refuse)
    again = sharding_of_job(job, layout)[1]
    assert again.rules == sharding.rules and again.boundary_comms == sharding.boundary_comms
    assert again.proof == f"{sharding.proof}, in an earlier run"
    with pytest.raises(AssertionError, match="proven again"):
        sharding_of_job(job.model_copy(update={"layout": job.layout.model_copy(update={"sp": True})}), layout)
    file.write_text(file.read_text().replace("columns", "rows"))
    monkeypatch.setattr(proposed_sharding, "_proven", proven)
    assert sharding_of_job(job, layout)[1] == sharding
