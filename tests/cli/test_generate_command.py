"""`motet generate`: the texts of runs, checkpoints and folders of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from data.chat_tokenizers import write_chat_tokenizer
from export.stored_models import DECODERS, OWN, built_with_random_values, hf_job, job_of, store
from models.tiny_configs import TINY_CONFIGS
from motet.checkpoint.reader import open_checkpoint
from motet.cli.main import app
from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.data.corpus.text_stream import TextStream
from motet.data.corpus.tokenizer import load_tokenizer
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.monitor.events import TextSampled, read_events
from motet.parallel.process.launch_environment import SINGLE_RANK
from motet.train.job import Job, job_from_tree
from motet.train.launch.run_folder import job_to_tree
from refusals import refused
from train.runs import run_job, small_job

transformers = pytest.importorskip("transformers")


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def generated(*arguments: str | Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return values


def stored_run(job: Job, folder: Path) -> tuple[Path, torch.nn.Module]:
    """A run with random values, without training."""
    module = built_with_random_values(job)
    store(job, module, folder)
    (folder / "job.toml").write_text(to_toml(job_to_tree(job)))
    return folder, module


@pytest.mark.parametrize("name", ["llama-3.1", "qwen3", "mistral", "gpt2"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, _ = stored_run(job := job_of({**OWN, **DECODERS[name]}, tmp_path / "cache"), tmp_path / "run")
    exported = tmp_path / "exported"
    with open_checkpoint(folder) as checkpoint:
        export_to_hf(job, checkpoint, exported, settings=ExportSettings(), log=print)
    ours = generated(folder, "The clock", "--temperature", "0", "--tokens", "30")
    folders = generated(exported, "The clock", "--temperature", "0", "--tokens", "30")
    module = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt = torch.tensor([ours["prompt_tokens"]])
    ends = load_tokenizer("bytes").end_id
    theirs = module.generate(prompt, do_sample=False, max_new_tokens=30, eos_token_id=ends, pad_token_id=ends)
    expected = [token for token in theirs[0, prompt.shape[1] :].tolist() if token != ends]
    assert ours["tokens"] == folders["tokens"] == expected and len(expected) > 3
    assert ours["text"] == folders["text"] and (ours["step"], folders["step"]) == (1, None)
    drawn = [generated(path, "The clock", "--tokens", "30", "--seed", "3")["tokens"] for path in (folder, exported)]
    assert drawn[0] == drawn[1] != ours["tokens"]


def test_adapters_and_buffers_of_a_model_of_transformers(tmp_path: Path) -> None:
    config = TINY_CONFIGS["llama"] | {"model_type": "llama", "vocab_size": 300, "dtype": "float32"}
    job = hf_job(tmp_path / "hf", config, adapters={"rank": 2, "targets": ["*q_proj", "*down_proj"]})
    folder, module = stored_run(job, tmp_path / "run")
    ours = generated(folder / "checkpoints" / "step-00000001", "The clock", "--temperature", "0", "--tokens", "12")
    tokens = ours["prompt_tokens"]
    with torch.no_grad():
        for token in ours["tokens"]:
            assert token == int(module(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens = [*tokens, token]


def test_the_sample_of_a_run_is_what_its_checkpoint_generates(tmp_path: Path) -> None:
    job = small_job(tmp_path, "monitor.sample_tokens=12", "monitor.sample_prompt=The clock", "run.steps=2")
    folder = tmp_path / "run"
    assert run_job(SINGLE_RANK, job, folder) == 2
    (folder / "job.toml").write_text(to_toml(job_to_tree(job)))
    [sampled] = [event for event in read_events(folder / "events.jsonl") if isinstance(event, TextSampled)]
    options = ["--tokens", "12", "--top-p", "1", "--temperature", "0.8", "--seed", str(job.run.seed)]
    assert generated(folder, "The clock", *options)["text"] == sampled.text


def test_chat_and_ends(tmp_path: Path) -> None:
    """A model that always says `Fine` and then ends its turn."""
    folder = write_chat_tokenizer(tmp_path / "model", "chatml", eos_token="<|endoftext|>")
    tokenizer = load_tokenizer(str(folder))
    [fine], end = tokenizer.encode("Fine")[:1], tokenizer.backend.token_to_id("<|im_end|>")
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    module = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.transformer.wpe.weight[:, 0] = 1.0  # the first component tells when to end
        module.transformer.wte.weight[fine, 1] = 9.0
        module.transformer.ln_f.weight.fill_(1.0)
        module.lm_head.weight[fine, 0], module.lm_head.weight[end, 1] = 1.0, 3.0
    module.save_pretrained(folder)
    answer = generated(folder, "Hello there", "--chat", "--temperature", "0")
    assert answer["tokens"] == [fine] and answer["stop"] == "end"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "Hello there"}]
    assert answer["prompt_tokens"] == theirs.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    result = CliRunner().invoke(app, ["generate", str(folder), "Hello there", "--chat", "--temperature", "0"])
    assert result.stdout == tokenizer.decode([fine]) + "\n" and "the text ended after 1 tokens" in result.stderr
    plain = generated(folder, "Hello there", "--temperature", "0")  # the end of a turn does not end a plain text
    assert plain["stop"] == "context" and end in plain["tokens"]


def test_text_comes_in_characters() -> None:
    tokenizer, text = load_tokenizer("bytes"), "a\u00e9\U0001f600 z"
    stream = TextStream(tokenizer, tokenizer.encode("\u00e9"))
    parts = [stream.add(token) for token in tokenizer.encode(text)]
    assert [part for part in parts if part] == list(text) and stream.rest() == ""
    assert [stream.add(token) for token in [0xF0, 0x9F]] == ["", ""] and "\ufffd" in stream.rest()
    broken = TextStream(tokenizer, [])
    assert "".join(broken.add(0x80) for _ in range(9)) + broken.rest() == "\ufffd" * 9


def test_what_is_refused(tmp_path: Path) -> None:
    job = job_of({**OWN, **DECODERS["llama"]}, tmp_path / "cache")
    folder, _ = stored_run(job, tmp_path / "run")
    refused("the prompt has 64 tokens, but the context of the model holds 64", run, folder, "x" * 64)
    tree = job_to_tree(job)
    for model, data in (
        ({"factory": "tests.models:Plain"}, {}),
        ({**OWN, "family": "encoder"}, {"objective": "masked"}),
        ({**OWN, "family": "encoder-decoder"}, {"objective": "spans"}),
    ):
        other = job_from_tree({**tree, "model": model, "data": {**tree["data"], **data}})
        (folder / "job.toml").write_text(to_toml(job_to_tree(other)))
        refused("is not known to predict the next token of a text", run, folder, "x")
    other = job_from_tree({**tree, "model": {**OWN, "hidden": 48}})
    (folder / "job.toml").write_text(to_toml(job_to_tree(other)))
    refused(r"holds no parameter embedding.weight of shape \[300, 48\]", run, folder, "x")
    (tmp_path / "empty").mkdir()
    refused("empty holds no checkpoint", run, tmp_path / "empty", "x")
    hf = tmp_path / "hf"
    write_chat_tokenizer(hf, "chatml")
    (hf / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"] | {"model_type": "llama"}))
    refused("holds no weights", run, hf, "x")
    with pytest.raises(InputError, match="adapters of PEFT without their model"):
        (hf / "config.json").rename(hf / "adapter_config.json")
        run(hf, "x")
