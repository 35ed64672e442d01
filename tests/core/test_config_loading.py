"""Settings are read from files and written as TOML; what is wrong is told wherever in a tree of settings it stands."""

import math
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from motet.core.config_loading import FrozenSettings, read_toml, settings_from_dict
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.train.job import builtin_jobs, job_from_tree, load_job
from motet.train.launch.run_folder import job_to_tree


class Edge(FrozenSettings):
    length: float


class Circle(FrozenSettings):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0)]


class Square(FrozenSettings):
    kind: Literal["square"]
    edge: Edge


class Drawing(FrozenSettings):
    shapes: tuple[Annotated[Circle | Square, Field(discriminator="kind")], ...] = ()
    frame: Annotated[Circle | Square, Field(discriminator="kind")] | None = None
    pen: Literal["thin", "thick"] = "thin"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"shapes": [{"kind": "circle", "radius": -1}]}, "shapes.0.radius = -1 must be more than 0.0"),
        ({"shapes": [{"kind": "circl"}]}, "shapes.0.kind = 'circl' must be one of 'circle', 'square'; did you mean"),
        ({"shapes": [{"radius": 2}]}, "shapes.0.kind is missing; give one of circle, square"),
        (
            {"shapes": [{"kind": "square", "edge": {"length": 1, "lenght": 2}}]},
            "unknown key 'shapes.0.edge.lenght'; did you mean 'length'?",
        ),
        ({"frame": {"kind": "circle", "radius": 1, "edge": 2}}, "unknown key 'frame.edge'; valid here: kind, radius"),
        ({"frame": {"kind": "square", "edge": {}}}, "frame.edge.length is missing; give it a value, e.g. frame.edge."),
        ({"frame": {"kind": "square", "edge": 3}}, "frame.edge = 3 must be a section with keys"),
        ({"pen": "thik"}, "pen = 'thik' must be 'thin' or 'thick'; did you mean 'thick'?"),
        ({"pen": "\udcff"}, "a text in it is not Unicode; write it in UTF-8"),
        ({"shapes": [{"kind": "circle", "radius": 10**400}]}, "shapes.0.radius = 1000"),
        (
            {"frame": {"kind": "circle", "radius": -(2**63)}},
            "frame.radius = -9223372036854775808 must be at least -922337",
        ),
        ({"pen": "thik", "frame": 3}, "frame = 3 must be a section with keys; pen = 'thik' must be"),
    ],
)
def test_a_sentence_names_the_place_as_it_is_written(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_from_dict(Drawing, tree, "d.toml")
    assert str(caught.value).startswith(f"d.toml: {words}")


def test_the_largest_whole_number_is_that_of_a_tensor() -> None:
    frame = {"frame": {"kind": "circle", "radius": 2**63 - 1}}
    assert settings_from_dict(Drawing, frame, "d.toml").frame == Circle(kind="circle", radius=float(2**63 - 1))


def test_what_is_no_file(tmp_path: Path) -> None:
    assert read_toml("drawing", "house", {"house": "pen = 'thick'"}) == {"pen": "thick"}
    with pytest.raises(InputError, match=r"^no drawing 'hous': did you mean 'house'\? it is neither a file nor one of"):
        read_toml("drawing", "hous", {"house": ""})
    with pytest.raises(InputError, match=r"^no drawing '.*': look elsewhere; it is neither a file nor one of house$"):
        read_toml("drawing", str(tmp_path), {"house": ""}, "look elsewhere;")
    with pytest.raises(InputError, match=r"^cannot read drawing x*: File name too long; give another TOML file$"):
        read_toml("drawing", "x" * 300, {})


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
leaf = text | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


@given(st.dictionaries(text, value, max_size=5))
def test_whatever_is_written_reads_back(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_not_a_number_reads_back_and_what_it_looks_like() -> None:
    assert math.isnan(tomllib.loads(to_toml({"x": math.nan}))["x"])
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


def settings_classes(kind: type[FrozenSettings] = FrozenSettings) -> Iterator[type[FrozenSettings]]:
    for each in kind.__subclasses__():
        yield each
        yield from settings_classes(each)


def test_hints_of_other_programs_name_settings_that_exist() -> None:
    hinted = [kind for kind in settings_classes() if kind.other_names or kind.remedies]
    assert len(hinted) > 5
    for kind in hinted:
        names = {*kind.other_names, *(pattern.partition("=")[0] for pattern in kind.remedies)}
        assert names <= set(kind.model_fields), kind
        for field, patterns in kind.other_names.items():
            others = [name for name in kind.model_fields if any(fnmatchcase(name, p) for p in patterns.split())]
            assert set(others) <= {field}, kind


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("tensor_model_parallel_size=2", "layout.tp"),
        ("model.tensor-parallel-degree=2", "layout.tp"),
        ("virtual_pipeline_model_parallel_size=2", "layout.chunks"),
        ("gradient_accumulation_steps=2", "layout.microbatches"),
        ("fsdp=true", "layout.zero"),
        ("seq_len=128", "data.sequence_length"),
        ("train_micro_batch_size_per_gpu=2", "data.batch_sequences"),
        ("optimizer.max_lr=0.1", "optimizer.learning_rate"),
        ("optimizer.warmup_ratio=0.1", "optimizer.schedule.warmup_steps"),
        ("max_steps=3", "run.steps"),
        ("num_train_epochs=3", "run.epochs"),
        ("nproc_per_node=2", "run.ranks"),
        ("output_dir=x", "run.folder"),
        ("activation_checkpointing=full", "memory.recompute"),
        ("save_interval=3", "checkpoint.every"),
        ("eval_steps=3", "monitor.evaluate_every"),
        ("bf16=true", "precision.recipe"),
        ("model.d_model=32", "model.hidden"),
    ],
)
def test_a_key_of_another_program_gets_the_key_of_motet(override: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job("tiny", [override])
    assert str(caught.value) == f"tiny: unknown key {override.partition('=')[0]!r}; did you mean {hint!r}?"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("checkpoint.every=10min", "it counts steps, and minutes are checkpoint.every_minutes=10"),
        ("checkpoint.every=2h", "it counts steps, and minutes are checkpoint.every_minutes=10"),
        ("checkpoint.every_minutes=10min", "write the number of minutes alone, such as checkpoint.every_minutes=10"),
    ],
)
def test_minutes_between_checkpoints_have_a_key_of_their_own(override: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"must be a .*; {hint}$"):
        load_job("tiny", [override])
