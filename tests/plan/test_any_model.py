"""`motet show model --trace` and `motet plan` of modules of one's own, of other published models, and of T5."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet.cli.main import app
from motet.core.errors import InputError
from motet.models.spec.model_spec import spec_from_settings
from motet.models.spec.spec_file import read_spec_file
from motet.plan.planned_step import PlannedStep, spec_of
from motet.plan.search.layout_space import SearchSpace
from motet.train.job import load_job
from plan.sized_layouts import sized

ON_HOST = ("--cluster", "h100", "--gpus", "4", "--json")
OWN_MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def make(width=64, layers=4):
    blocks = nn.ModuleList(Block(width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(512, width), *[nn.Sequential(*blocks)], nn.Linear(width, 512))
"""


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    text = (
        '[model]\nfactory = "own_module:make"\nvocab_size = 512\n[data]\nsequence_length = 256\nbatch_sequences = 64\n'
    )
    (tmp_path / "own.toml").write_text(text + '[precision]\nrecipe = "bf16"\n[run]\nsteps = 5\n')
    return "own.toml"


def test_a_module_of_ones_own_is_shown_and_planned(job: str) -> None:
    shown = json.loads(run("show", "model", job, "--trace", "--output", "own.json", "--json"))
    known = json.loads(run("show", "model", "tiny", "--json"))
    assert shown.keys() == known.keys() and shown["blocks"][0].keys() == known["blocks"][0].keys()
    parameters = 2 * 512 * 64 + 512 + 4 * (2 * 4 * 64 * 64 + 5 * 64 + 2 * 64)
    assert shown["parameters"] == parameters == read_spec_file(Path("own.json")).spec.parameter_count
    by_trace, by_file = (run("plan", job, *ON_HOST, "--rejected", *more) for more in ((), ("--model", "own.json")))
    assert by_trace == by_file
    plans = json.loads(by_file)["plans"]
    assert plans and any(plan["runs_today"] for plan in plans)
    assert {word for plan in plans for word in plan["layout"].split()} >= {"dp=4", "zero=1"}


def test_a_file_is_planned_without_torch(job: str) -> None:
    run("show", "model", job, "--trace", "--output", "own.json")
    code = (
        "import sys; from motet.cli.main import app\n"
        f"try: app({['plan', job, *ON_HOST, '--model', 'own.json']!r})\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and '"step_time_s"' in done.stdout, done.stderr


def test_a_traced_model_is_planned_like_the_known_one(tmp_path: Path) -> None:
    """All figures are equal but for names: the spec of our own decoder is the same by its settings and by a trace."""
    path = str(tmp_path / "tiny.json")
    run("show", "model", "tiny", "precision.recipe=bf16", "--trace", "--output", path)
    cluster = ("--cluster", "h100", "--gpus", "8", "--json")
    words = ("plan", "tiny", "precision.recipe=bf16", "data.batch_sequences=64", *cluster)
    known, traced = (
        {plan["layout"]: plan for plan in json.loads(run(*words, "--top", "40", *more))["plans"]}
        for more in ((), ("--model", path))
    )
    both = known.keys() & traced.keys()  # Of kinds whose variants are all as fast, another one may be printed
    assert len(both) > 0.7 * len(known) == 0.7 * len(traced)
    for one, other in ((known[layout], traced[layout]) for layout in both):
        assert one["step_time_s"] == pytest.approx(other["step_time_s"], rel=0.02)
        for part, share in (("parameters", 1e-3), ("gradients", 1e-3), ("moments", 1e-3), ("total", 0.1)):
            assert one["memory_bytes"].get(part, 0) == pytest.approx(other["memory_bytes"].get(part, 0), rel=share)


def test_a_published_model_of_an_unknown_family_is_traced(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm", **sizes, **heads, **special}))
    with pytest.raises(InputError, match=r"model_type = 'glm' are unknown.*`motet show model hf:FOLDER --trace`"):
        run("show", "model", f"hf:{tmp_path}")
    shown = json.loads(run("show", "model", f"hf:{tmp_path}", "--trace", "--json"))
    assert shown["sequence_length"] == 64 and [block["repeat"] for block in shown["blocks"]] == [1, 2, 1]
    report = json.loads(run("plan", f"hf:{tmp_path}", "data.batch_sequences=16", *ON_HOST, "--top", "100"))
    assert any("tp=2" in plan["layout"] for plan in report["plans"])


def test_a_model_that_reads_a_source_is_planned_without_stages(tmp_path: Path) -> None:
    config = {"model_type": "t5", "num_layers": 4, "d_model": 256, "d_ff": 512, "num_heads": 4, "d_kv": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("plan", f"hf:{tmp_path}", "data.batch_sequences=64", *ON_HOST)
    report = json.loads(run(*words, "--top", "100", "--rejected"))
    layouts = [dict(word.split("=") for word in plan["layout"].split()) for plan in report["plans"]]
    assert {layout.get("tp", "1") for layout in layouts} >= {"1", "2"} and all("pp" not in each for each in layouts)
    reasons = {each["layout"]: each["reason"] for each in report["rejected"]}
    assert reasons["pp=2"] == "parts of a model that reads a source besides its tokens cannot be planned yet"
    with pytest.raises(InputError, match=r"pp = 2: parts of a model that reads a source .*; set pp = 1"):
        run(*words, "--layout", "pp=2")
    plan = json.loads(run(*words, "--layout", "dp=4 zero=1"))["plans"][0]
    tokens = json.loads(run("show", "model", f"hf:{tmp_path}", "--json"))["tokens_per_sequence"]
    assert plan["tokens_per_s_per_gpu"] * plan["step_time_s"] * 4 == pytest.approx(64 * tokens)


def test_what_a_trace_cannot_split_is_listed_as_impossible(job: str) -> None:
    path = Path("own_module.py")
    path.write_text(path.read_text().replace("4 * width, width)", "4 * width, 3 * width), nn.Linear(3 * width, width)"))
    source = path.read_text().replace("self.norm, self.up, self.down =", "self.norm, self.up, self.mid, self.down =")
    path.write_text(source.replace("self.down(self.up", "self.down(self.mid(self.up").replace(".relu())", ".relu()))"))
    report = json.loads(run("plan", job, *ON_HOST, "--rejected"))
    reasons = {each["layout"]: each["reason"] for each in report["rejected"]}
    assert reasons["tp=2"] == "the trace does not show how to split mid.weight (256 x 192) of 1.0"
    with pytest.raises(InputError, match="tp = 2: the trace does not show how to split"):
        run("plan", job, *ON_HOST, "--layout", "tp=2 sp=true")


OTHER_MODULES = """
from torch import nn

class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.layers = nn.ModuleList(nn.Conv1d(64, 64, 3, padding=1) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x.transpose(1, 2))

def make():
    return Convolutions()

def make_without_blocks():
    return nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512))
"""


@pytest.mark.parametrize(
    "stack",
    ["motet", "megatron", *(pytest.param(s, marks=pytest.mark.proof) for s in ("torchtitan-compiled", "deepspeed"))],
)
def test_modules_without_blocks_or_with_convolutions_are_planned(job: str, stack: str) -> None:
    Path("own_module.py").write_text(OTHER_MODULES)
    words = ("plan", job, *ON_HOST, "--stack", stack)
    report = json.loads(run(*words, "--top", "100", "--rejected"))
    reasons = {each["layout"]: each["reason"] for each in report["rejected"]}
    assert reasons["tp=2"] == "the trace does not show how to split weight (192 x 64) of layers.0"
    assert not any(" ep=" in plan["layout"] for plan in report["plans"])  # A convolution has no experts
    outside = (*words, 'model.factory="own_module:make_without_blocks"')
    for layout in ("zero=1", "zero=3", "zero=2 microbatches=2", "recompute=full"):
        assert json.loads(run(*outside, "--layout", layout))["plans"][0]["fits"]
    with pytest.raises(InputError, match="2 stages cannot share a model without a list of blocks; use 1 stage"):
        run(*outside, "--layout", "pp=2")


def test_blocks_after_a_frozen_embedding_are_blocks(job: str) -> None:
    path = Path("own_module.py")
    frozen = "    module[0].weight.requires_grad_(False)\n    return module"
    path.write_text(path.read_text().replace("return nn.Sequential(", "module = nn.Sequential(") + frozen)
    run("show", "model", job, "--trace", "--output", "own.json")
    assert read_spec_file(Path("own.json")).spec.policy_count == 4


def test_a_model_without_blocks_has_no_stages() -> None:
    spec = spec_from_settings(load_job("tiny").model)
    outside = type(spec)((spec.blocks[0], spec.blocks[-1]))
    layouts = list(SearchSpace(outside, 256, 64, 8, 8).layouts())
    assert layouts and all(layout.pp == 1 for layout in layouts)
    step = PlannedStep(outside, 256, 64, **sized(dp=8))
    assert step.stage_specs == (outside,) and spec_of(outside) is outside
