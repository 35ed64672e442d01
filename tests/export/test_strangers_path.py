"""The path of somebody who comes from Hugging Face and goes back, by the commands alone.

A folder of `save_pretrained` gets adapters on conversations; the run is stopped and resumed in another layout; the
export loads in transformers, which continues a prompt with the tokens of `motet generate`, and PEFT loads the adapters.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.chat_tokenizers import write_chat_tokenizer
from models.tiny_configs import TINY_CONFIGS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
MOTET = Path(sys.executable).with_name("motet")
QUESTION = "What is 2 + 2?"
# Family -> style of the chat template, and the layout in which the run is resumed
PATHS = {
    "llama": ("llama3", ("layout.tp=2", "layout.sp=true")),
    "qwen3": ("chatml", ("layout.pp=2", "layout.microbatches=2")),
    "gemma3_text": ("gemma", ("layout.zero=3", "memory.optimizer=host")),
}


def motet(folder: Path, *words: str) -> str:
    command = [MOTET, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def save_base(folder: Path, family: str, style: str) -> Path:
    """A model with random values that are large enough for its answers to differ, and its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_chat_tokenizer(folder / "base", style))
    torch.manual_seed(3)
    sizes = {**TINY_CONFIGS[family], "vocab_size": len(tokenizer), "max_position_embeddings": 128}
    sizes |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.AutoConfig.for_model(family, **sizes, initializer_range=0.3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers for it
@pytest.mark.parametrize("family", PATHS)
def test_adapters_on_conversations_go_back_to_transformers(tmp_path: Path, family: str) -> None:
    style, other_layout = PATHS[family]
    base = save_base(tmp_path, family, style)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is four."}]
    lines = [json.dumps({"messages": [dict(turns[0], content=f"{QUESTION} ({i})"), turns[1]]}) for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    settings = [
        *(f"model={{factory='hf:{base}', adapters={{rank=4, targets=['*.q_proj', '*.v_proj', '*.down_proj']}}}}",),
        *("data.source=chats.jsonl", f"data.tokenizer={base}", "data.sequence_length=64", "data.batch_sequences=4"),
        *("run.steps=12", "run.ranks=2", "run.threads=1", "run.device=cpu", "optimizer.learning_rate=0.02"),
        *("precision.recipe=fp32", "monitor.tensorboard=false", "monitor.sample_tokens=0", "data.cache=cache"),
    ]
    motet(tmp_path, "train", "tiny", *settings, "run.stop_at=6", "--run-folder", "run")
    motet(tmp_path, "train", "--resume-from", "run", *other_layout)
    motet(tmp_path, "checkpoint", "export", "run", "merged", "--to", "hf")
    motet(tmp_path, "checkpoint", "export", "run", "lora", "--to", "hf", "--adapters", "peft")

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": 24, "do_sample": False}
    length = prompt["input_ids"].shape[1]
    expected = merged.generate(**prompt, **options)[0, length:].tolist()
    assert 2 <= len(expected) < 24 and expected.pop() in merged.generation_config.eos_token_id
    words = (QUESTION, "--chat", "--temperature", "0", "--tokens", "24", "--json")
    for source in ("run", "merged"):
        answer = json.loads(motet(tmp_path, "generate", source, *words))
        assert answer["tokens"] == expected, (source, answer)
    assert answer["stop"] == "end"

    untrained = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        before = untrained(**prompt).logits
        adapted = peft.PeftModel.from_pretrained(untrained, tmp_path / "lora")(**prompt).logits
        after = merged(**prompt).logits
    torch.testing.assert_close(adapted, after, rtol=1e-4, atol=1e-4)
    assert (before - after).abs().max() > 0.1
