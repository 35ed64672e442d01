"""Commands about large models allocate little: each runs in a process whose data is limited."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from environment import uncounted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits mapped memory on Linux only")
_LARGE_CONFIG = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
"intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
"vocab_size": 150000, "bos_token_id": 128000, "eos_token_id": 128001}"""
# Command, whose words are separated by two spaces or more -> the most MiB of data that it may have.
_QUICK: dict[str, int] = {
    "plan  layouts  llama3-405b  --cluster  h100  --gpus  16384  --layout  dp=128 tp=8 pp=16": 200,
}
_LONG: dict[str, int] = {
    "show  layout  dp=1 tp=8  --job  llama3-8b": 600,
    "show  layout  dp=64 zero=1 tp=8 pp=16 microbatches=32  --job  llama3-405b  data.batch_sequences=2048": 1500,
    "show  layout  dp=8 tp=8 pp=8  --job  gpt3-175b  data.batch_sequences=1536": 1500,
    "show  layout  dp=8 tp=8 pp=16  --job  nemotron-340b  data.batch_sequences=2048": 1500,
    "show  layout  dp=8 tp=8 pp=8  --job  llama3-8b  model={factory='hf:CONFIG'}  data.batch_sequences=2048": 1500,
    "show  layout  dp=16384 zero=1  --job  llama3-8b  data.batch_sequences=16384": 1500,
}


def _run(command: str, limit_mib: int, home: Path) -> subprocess.CompletedProcess[str]:
    config = home / "config.json"
    config.write_text(_LARGE_CONFIG)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    return subprocess.run(
        [sys.executable, "-m", "motet", *re.split("  +", command.replace("CONFIG", str(config)))],
        preexec_fn=limit,
        env=uncounted() | {"HOME": str(home), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "limit_mib"),
    [*_QUICK.items(), *(pytest.param(*item, marks=pytest.mark.proof) for item in _LONG.items())],
)
def test_a_command_about_a_large_model_needs_little_memory(command: str, limit_mib: int, tmp_path: Path) -> None:
    done = _run(command, limit_mib, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_command_without_enough_memory_says_so(tmp_path: Path) -> None:
    done = _run("show  layout  dp=1 tp=8  --job  llama3-8b", 320, tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert " ".join(done.stderr.split()).endswith(
        "motet: this command needs more memory than it gets: RLIMIT_DATA (ulimit -d) allows 320 MiB; "
        "end other processes, raise the limit, or take a larger machine"
    )
