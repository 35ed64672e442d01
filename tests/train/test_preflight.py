"""Jobs that files alone show to be wrong are refused before a rank starts, each in one sentence."""

import json
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.data.corpus.prepare import prepare_data
from motet.parity.verify_job import make_verification_plans, verify_job_layouts
from motet.train.job import Job, load_job
from motet.train.launch.preflight import check_data, check_job, check_split
from train.runs import HUGGING_FACE, small_job


def huggingface_job(folder: Path, *overrides: str, model: str = "llama", **sizes: int) -> Job:
    path = folder / "config.json"
    path.write_text(json.dumps({**HUGGING_FACE[model], "vocab_size": 260, **sizes}))
    return small_job(folder, f"model={{factory='hf:{path}'}}", *overrides)


@pytest.mark.parametrize(("model", "key"), [("llama", "max_position_embeddings"), ("gpt2", "n_positions")])
def test_positions_below_the_sequence(tmp_path: Path, model: str, key: str) -> None:
    check_job(huggingface_job(tmp_path, model=model, **{key: 32}), 1)
    with pytest.raises(InputError, match=rf"sequence_length = 32 is more than model.arguments.{key} = 31; shorten"):
        check_job(huggingface_job(tmp_path, model=model, **{key: 31}), 1)
    check_job(huggingface_job(tmp_path, f"model.arguments.{key}=64", model=model, **{key: 31}), 1)


def test_a_vocabulary_below_that_of_the_tokenizer(tmp_path: Path) -> None:
    job = huggingface_job(tmp_path, vocab_size=100)
    with pytest.raises(InputError, match=r"model.arguments.vocab_size = 100 is less than the 259 tokens"):
        check_data(job, prepare_data(job.data))


def test_verify_refuses_it_too(tmp_path: Path) -> None:
    job = small_job(tmp_path, "model.vocab_size=200")
    (plan,) = make_verification_plans(job, ["dp=2"], print)
    with pytest.raises(InputError, match=r"model.vocab_size = 200 is less than the 259 tokens"):
        verify_job_layouts(plan, {}, log=print, on_verdict=print)


def test_ranks_that_divide_little() -> None:
    problem = "layout.tp = 3 does not divide model.heads = 8 or model.ffn_hidden = 688, so each rank would hold 73% of"
    with pytest.raises(InputError, match=rf"^{problem} the matrices as a whole; .* layout.require_split=0.26$"):
        check_split(load_job("tiny", ["layout.tp=3"]), 3)
    check_split(load_job("tiny", ["layout.tp=3", "layout.require_split=0.26"]), 3)
    check_split(load_job("tiny", ["layout.tp=3", "model.ffn_hidden=768"]), 3)
    check_split(load_job("tiny", ["layout.tp=4"]), 4)
