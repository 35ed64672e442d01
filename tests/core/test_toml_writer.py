"""Values written as TOML read back as the same values."""

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.toml_writer import to_toml
from motet.train.job import builtin_jobs, job_from_tree, load_job
from motet.train.launch.run_folder import job_to_tree

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
leaf = text | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


@given(st.dictionaries(text, value, max_size=5))
def test_whatever_is_written_reads_back(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_not_a_number_reads_back() -> None:
    assert math.isnan(tomllib.loads(to_toml({"x": math.nan}))["x"])


def test_what_it_looks_like() -> None:
    tree = {"name": "x", "a": {"b": {"c": 1}, "d": [1.5, "two", {"e": True}]}, "empty": {}}
    assert to_toml(tree) == 'name = "x"\n\n[a]\nd = [1.5, "two", { e = true }]\n\n[a.b]\nc = 1\n\n[empty]\n'


def test_what_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        to_toml({"x": None})


@pytest.mark.parametrize("name", builtin_jobs())
def test_built_in_jobs_come_back_the_same(name: str) -> None:
    job = load_job(name)
    assert job_from_tree(tomllib.loads(to_toml(job_to_tree(job)))) == job


def test_a_job_with_everything_comes_back_the_same(tmp_path: Any) -> None:
    values = ["optimizer.clip_norm=false", "run.epochs=1.5", "model.adapters={rank = 4}", "optimizer.eps=1e-300"]
    groups = 'optimizer.groups=[{match = ["*.bias", "a\\"b"], learning_rate_scale = 0.5}]'
    job = load_job("tiny", [*values, groups, 'data.mixture=[{source = "stdlib", weight = 2}, {source = "x/*.txt"}]'])
    (tmp_path / "job.toml").write_text(to_toml(job_to_tree(job)))
    assert load_job(str(tmp_path / "job.toml")) == job and job.optimizer.clip_norm is None
