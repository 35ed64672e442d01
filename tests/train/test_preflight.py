"""Jobs that motet refuses before ranks start, beyond those of tests/cli/test_train.py."""

from dataclasses import replace

import pytest

from motet.core.errors import InputError
from motet.data.corpus.token_store import PreparedData
from motet.train.job import Job, builtin_jobs, load_job
from motet.train.launch.preflight import check_data, check_job
from refusals import refused

DATA = PreparedData(corpora=(), tokenizer="bytes", sentinels=0, vocab_size=260, classes=2, train_samples=9)


@pytest.mark.parametrize("name", builtin_jobs())
def test_built_in_jobs_can_be_trained_or_say_that_they_are_for_planning(name: str) -> None:
    job = load_job(name)
    planned = {"mixtral-8x7b": "experts", "deepseek-v3": "experts"}
    if name in planned:
        refused(rf"\[model\.{planned[name]}\] .* not trained yet", check_job, job, job.run.ranks)
    else:
        assert check_job(job, job.run.ranks).ranks == job.run.ranks


def test_latent_attention_is_for_planning() -> None:
    latent = "model.latent_attention={key_value_rank=8, rotary_head_dim=8, plain_head_dim=8, value_head_dim=8}"
    refused(r"\[model\.latent_attention\]", check_job, load_job("tiny", [latent]), 2)


@pytest.mark.parametrize(
    ("name", "objective", "fits"),
    [("tiny", "spans", "causal"), ("bert-tiny", "causal", "masked"), ("bert-classify", "masked", "classify")],
)
def test_each_model_has_its_objective(name: str, objective: str, fits: str) -> None:
    job = load_job(name, [f"data.objective={objective}"])
    refused(rf"data\.objective = '{objective}' does not fit .*objective={fits}$", check_job, job, job.run.ranks)


def test_a_model_of_somebody_else_may_have_any_objective() -> None:
    model = "model={factory='a:b'}"
    for objective in ("causal", "masked", "spans", "classify"):
        check_job(load_job("tiny", [model, f"data.objective={objective}", "data.sequence_length=9999"]), 2)


def job(*overrides: str) -> Job:
    return load_job("bert-classify", ["model.vocab_size=260", *overrides])


def test_tokens_and_classes_that_the_model_has_no_place_for() -> None:
    check_data(job(), DATA)
    check_data(job("model.classes=5"), DATA)
    with pytest.raises(InputError, match=r"model\.classes = 2, but the data has 3; set model\.classes=3"):
        check_data(job(), replace(DATA, classes=3))
    with pytest.raises(InputError, match=r"model\.vocab_size = 259 is less than the 260 tokens .*=260 or more"):
        check_data(job("model.vocab_size=259"), DATA)
    check_data(load_job("tiny", ["model={factory='a:b'}"]), replace(DATA, vocab_size=10**6, classes=9))
