"""A job is made small, and stays what it is."""

import json
from pathlib import Path

import pytest

from motet.models.settings import TransformerSettings, UserModuleSettings
from motet.parallel.layout import parse_layout, with_default_ranks
from motet.parity.candidate_layouts import CandidateLayout, layouts_up_to, make_candidate
from motet.parity.shrink_job import make_small_job
from motet.parity.verify_job import make_verification_plans, refused_layouts
from motet.train.job import Job, builtin_jobs, load_job
from refusals import refused

pytestmark = pytest.mark.counted
ROWS, STEPS = 12, 3


@pytest.mark.parametrize("name", builtin_jobs())
def test_every_built_in_job_is_small(name: str) -> None:
    job = load_job(name)
    small = make_small_job(job, ROWS, STEPS)
    assert small.run.steps == STEPS and small.data.batch_sequences == ROWS
    assert small.precision.recipe == "fp64" and isinstance(small.model, TransformerSettings)
    assert small.model.layers <= 2 and small.model.hidden <= 512 and small.optimizer.betas == job.optimizer.betas


def _module_of(hidden: int, layers: int = 8) -> Job:
    arguments = f"hidden_size={hidden}, intermediate_size={4 * hidden}, num_hidden_layers={layers}"
    return load_job("tiny", [f"model={{factory='train.sized_models:Sized', arguments={{{arguments}}}}}"])


def test_a_large_module_whose_function_has_sizes_is_small() -> None:
    small = make_small_job(_module_of(512), ROWS, STEPS).model
    assert isinstance(small, UserModuleSettings)
    assert small.arguments["hidden_size"] <= 64 and small.arguments["num_hidden_layers"] == 2


def test_a_module_that_is_small_keeps_its_sizes_and_so_does_one_whose_function_has_none() -> None:
    unsized = load_job("tiny", ["model={factory='train.sized_models:Unsized'}"])
    for job in (_module_of(64), unsized):
        assert make_small_job(job, ROWS, STEPS).model == job.model


def test_the_last_step_has_a_learning_rate(tmp_path: Path) -> None:
    assert make_small_job(load_job("bert-classify"), ROWS, STEPS).optimizer.schedule.final_fraction > 0


def test_a_model_has_pieces_for_all_servers_and_several_buckets() -> None:
    small = make_small_job(load_job("tiny"), ROWS, STEPS)
    assert make_candidate(small, "dp=2 data=parameter_server server.count=2").job.layout.server.slice_mib < 0.1
    assert small.communication.bucket_mib <= 0.5


def test_clipping_that_is_off_stays_off() -> None:
    assert make_small_job(load_job("tiny", ["optimizer.clip_norm=false"]), ROWS, STEPS).optimizer.clip_norm is None


def test_batches_can_be_cut_by_all_layouts() -> None:
    plans = make_verification_plans(load_job("tiny"), layouts_up_to(4), print)
    assert [plan.job.model.layers for plan in plans] == [2, 4]  # Four stages need four blocks
    for plan in plans:
        assert all(plan.job.data.batch_sequences % candidate.microbatches == 0 for candidate in plan.candidates)
    assert json.dumps(layouts_up_to(4)).count("dp=4") > 20


def test_layouts_for_many_ranks_have_several_small_batches() -> None:
    subjects = make_verification_plans(load_job("tiny"), layouts_up_to(9), print)
    rows = [subject.job.data.batch_sequences for subject in subjects]
    assert len(rows) > 1 and max(rows) <= 64
    assert sorted(layouts_up_to(9)) == sorted(each.layout for subject in subjects for each in subject.candidates)
    for subject in subjects:
        assert all(subject.job.data.batch_sequences % each.microbatches == 0 for each in subject.candidates)
    (alone,) = make_verification_plans(load_job("tiny"), ["dp=40"], print)
    assert alone.job.data.batch_sequences == 80


def test_where_layouts_need_not_cut_evenly_none_does() -> None:
    layouts = ["dp=2", "dp=3 zero=3", "dp=4 zero=1"]
    (subject,) = make_verification_plans(load_job("tiny", ["run.reproducible=layout"]), layouts, print)
    assert all(subject.job.data.batch_sequences % each.world for each in subject.candidates)


def test_layouts_that_a_job_cannot_have_are_left_out_of_all() -> None:
    without = refused_layouts(load_job("tiny", ["run.reproducible=layout"]), layouts_up_to(3))
    assert "dp=3 zero=3" not in without and "dp=1 microbatches=2" in without
    refused(r"outer\.every = 2", refused_layouts, load_job("tiny", ["outer.every=2"]), layouts_up_to(2))


def test_what_differs_by_design_is_left_out() -> None:
    told: list[str] = []
    job = load_job("tiny", ["communication.compress_gradients=int8"])
    assert make_verification_plans(job, ["dp=2"], told.append)[0].job.communication.compress_gradients is None
    assert "loses bits by design" in told[0]
    refused(r"outer\.every = 2", make_verification_plans, load_job("tiny", ["outer.every=2"]), ["dp=2"], print)


def test_a_layout_is_for_as_many_ranks_as_its_dimensions() -> None:
    told = {layout: with_default_ranks(layout, 8) for layout in ("", "zero=1", "tp=2 zero=1", "pp=2 cp=2", "dp=3 tp=2")}
    assert list(told.values()) == ["dp=8", "dp=8 zero=1", "dp=4 tp=2 zero=1", "dp=2 pp=2 cp=2", "dp=3 tp=2"]
    refused(r"layout\.tp = 3 does not divide 8 ranks", with_default_ranks, "tp=3", 8)
    job = load_job("tiny").model_copy(update={"layout": parse_layout("pp=2 dp=3 tp=4 microbatches=5")})
    candidate = CandidateLayout("", job)
    assert (candidate.world, candidate.microbatches) == (24, 15)
