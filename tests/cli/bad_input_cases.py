"""Files and state that each line of docs/reference/bad-input.md needs, by the words of its first column.

A line that needs nothing but `small.toml`, `text.txt`, `models.py` and its own command has no entry here.
"""

import json
import os
import resource
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32, "vocab_size": 260}
MODELS = '''
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(260, 8), nn.Linear(8, 260)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
class Skips(Plain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        first = self.blocks[0](self.embedding(tokens))
        return self.head(self.blocks[1](first) + first)
class TwoTexts(Plain):
    def forward(self, tokens, other): ...
class OneShort(Plain):
    def forward(self, tokens):
        return super().forward(tokens)[:, :-1]
class Tuple(Plain):
    def forward(self, tokens):
        return (super().forward(tokens),)
class SmallTable(Plain):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
class SmallTableInBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SmallTable()])

    def forward(self, tokens):
        return self.blocks[0](tokens)
class FewLogits(Plain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 200)
class Detached(Plain):
    def forward(self, tokens):
        return super().forward(tokens).detach()
class PlainNumber(Plain):
    def loss_sum(self, batch):
        return 3.5
class LossPerToken(Plain):
    def loss_sum(self, batch):
        return self(batch.tokens).logsumexp(-1)
class Meta(Plain):
    def __init__(self):
        with torch.device("meta"):
            super().__init__()
class Complex(Plain):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
class Lazy(Plain):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(260)
class NotANumber(Plain):
    """From the third of its batches on."""
    calls = 0

    def forward(self, tokens):
        self.calls += self.training
        return super().forward(tokens) * (float("nan") if self.calls > 2 else 1.0)
class Renames(Plain):
    """Renames its run folder in the third of its batches."""
    calls = 0

    def forward(self, tokens):
        from pathlib import Path
        self.calls += self.training
        if self.calls == 3 and Path("runs/mine-001").exists():
            Path("runs/mine-001").rename("runs/renamed")
        return super().forward(tokens)
class Empty(nn.Module):
    def forward(self, tokens):
        return torch.zeros(*tokens.shape, 260)
def a_number(): return 5
size = 5
def fails(): raise ValueError("a bug in the user's code")
'''
Setup = Callable[[], object]


class CannotBeTriedError(Exception):
    pass


def only_if(condition: Callable[[], bool], otherwise: str) -> Setup:
    def check() -> None:
        if not condition():
            raise CannotBeTriedError(otherwise)

    return check


def no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def write(name: str, content: str | bytes = "") -> Setup:
    def put() -> None:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return put


def records(name: str, *lines: object) -> Setup:
    return write(name, "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def edit(name: str, old: str, new: str) -> Setup:
    def put() -> None:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return put


def remove(name: str) -> Setup:
    return lambda: shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


def huggingface(folder: str, **changes: object) -> Setup:
    return write(f"{folder}/config.json", json.dumps({**LLAMA, **changes}))


def limit_files(size_bytes: int) -> Setup:
    """Limit files like `ulimit -f` does; the folder of the line lifts it again."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def cut(pattern: str) -> Setup:
    def half() -> None:
        (path,) = Path().glob(pattern)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return half


def weights(folder: str, *, without: str = "", cut_short: bool = False) -> Setup:
    def put() -> None:
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoModelForCausalLM

        huggingface(folder)()
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        tensors = {name: t.clone() for name, t in module.state_dict().items() if name != without}
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        if cut_short:
            cut(f"{folder}/model.safetensors")()

    return put


def disk(size: str) -> Setup:
    """A file system of this size in the folder `disk`."""

    def mount() -> None:
        Path("disk").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", "disk"]
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False)
        if not mounted or mounted.returncode:
            raise CannotBeTriedError("mounting a file system needs root")

    return mount


def latin_parquet(path: Path) -> None:
    """Two texts, of which one is in another encoding."""
    import pyarrow
    import pyarrow.parquet

    ends, texts = (pyarrow.py_buffer(content) for content in (struct.pack("<3i", 0, 3, 6), b"ab\xffcde"))
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.StringArray.from_buffers(2, ends, texts)}), path)


def long_run_folder() -> None:
    job = Path("small.toml").read_text(encoding="utf-8")
    Path("long.toml").write_text(f'{job}folder = "{"a/" * 1500}a"\n', encoding="utf-8")


def gathering(*chunks: int) -> str:
    """An all-gather of two ranks, as JSON, in which rank 0 copies only these chunks to rank 1."""
    both = {"0": [0], "1": [1]}
    head = {"version": 1, "collective": "all-gather", "algorithm": "ring", "ranks": 2, "chunks": 2, "sizes": [1, 1]}
    transfers = [{"src": 0, "dst": 1, "chunk": [chunk, chunk], "op": "copy"} for chunk in chunks]
    return json.dumps({**head, "initial": [[0], [1]], "final": [both, both], "steps": [transfers]})


def less() -> str:
    """An all-reduce whose rank 1 need not end with the sum."""
    from motet.collectives import build

    ring = build("all-reduce", "ring", 2)
    return replace(ring, final=(ring.final[0], {})).to_json()


def cluster(name: str, *, alpha_s: str = "1e-6", bandwidth_Bps: str = "1e9", more: str = "") -> Setup:  # noqa: N803
    head = "device = 'H100'\ndevices_per_host = 2\n[inside]\nkind = 'switch'\n"
    return write(name, f"{head}alpha_s = {alpha_s}\nbandwidth_Bps = {bandwidth_Bps}\n{more}")


CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
TYPO = {"role": "asistant", "content": "4"}
THREE_CLASSES = records("labels.jsonl", *({"text": f"text {i}", "label": i % 3} for i in range(60)))
BERT_CLASSES = huggingface("bert", model_type="bert", architectures=["BertForSequenceClassification"])
ALONE = {"version": 1, "collective": "mine", "algorithm": "nothing", "ranks": 1, "chunks": 1, "sizes": [1]}
ALONE |= {"initial": [[0]], "final": [{"0": [0]}], "steps": []}
WIDE = "[between]\nkind = 'spine_leaf'\nalpha_s = 1e-6\nbandwidth_Bps = 1e9\nhosts_per_leaf = 1\nuplinks = 1000000000\n"


def module_of_job(job: str) -> Setup:
    """Make the model of a stored job one of models.py."""

    def put() -> None:
        text = Path(job).read_text()
        before, _, after = text.partition("[model]")
        rest = after[after.index("\n[") :]
        Path(job).write_text(f'{before}[model]\nfamily = "module"\nfactory = "models:Plain"\n{rest}')

    return put


RUN = "run"
"""Stands for a copy of a run in the folder `run`, stopped at step 4 of 6, with checkpoints of the steps 2 and 4."""
FINISHED = "done"
"""The same, but at its end."""
NEWEST = "run/checkpoints/step-00000004"
OTHER_STEP = edit(f"{NEWEST}/manifest.json", '"step": 4', '"step": 5')
OTHER_MANIFEST = edit(f"{NEWEST}/manifest.json", '"master/embedding.weight"', '"master/table.weight"')
CASES: dict[str, list[Setup | str]] = {
    "CUDA where there is none": [only_if(no_cuda, "there is CUDA")],
    "W&B where it is not installed": [only_if(lambda: find_spec("wandb") is None, "wandb is installed")],
    "a word that is no action in the file of a schedule": [write("mine.csv", "0F0,0B0\n1F0,1X0")],
    "the file of a schedule for other micro-batches": [write("mine.csv", "0F0,0B0\n1F0,1B0")],
    "the file of a schedule that forgets a backward": [write("mine.csv", "0F0,0B0\n1F0")],
    "the file of a schedule that deadlocks": [write("mine.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")],
    "broken TOML": [write("broken.toml", "[run\nsteps = 3")],
    "a job in another encoding": [write("latin.toml", b"# caf\xe9\n[run]\nsteps = 3\n")],
    "a number of thousands of digits": [write("digits.toml", f"steps = {'9' * 5000}")],
    "lists in lists in lists": [write("deep.toml", f"steps = {'[' * 5000}{']' * 5000}")],
    "a run folder in place of a job": [RUN],
    "an empty file of text": [write("empty.txt")],
    "a file of an unknown kind": [write("text.xyz", "words")],
    "a folder without text": [write("images/cat.png", b"\x89PNG")],
    "a corpus shorter than a sequence": [write("short.txt", "few words")],
    "a line of JSONL that is broken": [records("bad.jsonl", {"text": "fine"}, '{"text": "torn')],
    "a line of JSONL with a number of thousands of digits": [
        records("digits.jsonl", {"text": "fine"}, f'{{"n": {"9" * 5000}}}')
    ],
    "a line of JSONL that is nested too deeply": [
        records("deep.jsonl", {"text": "fine"}, "[" * 200_000 + "]" * 200_000)
    ],
    "a record without its field": [records("other.jsonl", {"text": "fine"}, {"txt": "here"})],
    "a conversation with an unknown role": [records("roles.jsonl", CHAT, {"messages": [*CHAT["messages"][:1], TYPO]})],
    "a message without content": [records("content.jsonl", {"messages": [{"role": "user"}]})],
    "conversations, and a tokenizer without a chat template": [records("chats.jsonl", CHAT)],
    "conversations, and a tokenizer that motet would train": [records("chats.jsonl", CHAT)],
    "conversations in which the assistant says nothing": [records("silent.jsonl", {"messages": CHAT["messages"][:1]})],
    "a field that is no text": [records("number.jsonl", {"text": 3})],
    "records without any text": [records("nothing.jsonl", {"text": ""}, {"text": None})],
    "a Parquet file that is none": [write("bad.parquet", "words")],
    "a Parquet file with text that is not UTF-8": [lambda: latin_parquet(Path("latin.parquet"))],
    "labels that are words": [records("words.jsonl", {"text": "good", "label": "pos"})],
    "more labels than classes": [THREE_CLASSES],
    "half of a Megatron corpus": [write("half.bin", b"\0\0")],
    "a tokenizer.json that is broken": [write("tokenizer.json", "{")],
    "a cache that cannot be written": [disk("ro")],
    "a cache that is a file": [write("occupied")],
    "a full disk while the cache is built": [disk("size=4k")],
    "a corpus built into a folder of other things": [write("thesis/chapter.tex")],
    "a run folder that is a file": [write("occupied")],
    "a run folder whose name is too long": [long_run_folder],
    "a lock that is a symbolic link": [
        RUN,
        remove("run/run.lock"),
        lambda: Path("run/run.lock").symlink_to("text.txt"),
    ],
    "a run folder below a file": [write("occupied")],
    "a run folder of other things": [write("thesis/chapter.tex")],
    "a run folder that cannot be written": [disk("ro")],
    "a full disk when the run folder is made": [disk("size=4k")],
    "an existing run that must not go on": [RUN],
    "resuming with another model": [RUN],
    "resuming with fewer steps": [RUN],
    "resuming to stop at a step that is past": [RUN],
    "resuming with another job's file edited": [RUN, edit("run/job.toml", "hidden = 16", "hidden = 32")],
    "resuming a finished run": [FINISHED],
    "resuming where the summary is damaged": [RUN, write("run/summary.json", "{")],
    "resuming where versions.json is damaged": [RUN, write("run/versions.json", "[")],
    "resuming where events.jsonl is damaged": [RUN, write("run/events.jsonl", "{\n")],
    "resuming after the data changed": [RUN, edit("text.txt", "the", "The")],
    "resuming a checkpoint that is cut short": [RUN, cut(f"{NEWEST}/*.safetensors")],
    "resuming a checkpoint without its tensors": [RUN, remove(f"{NEWEST}/rank-00000.safetensors")],
    "resuming a checkpoint without manifest": [RUN, remove(f"{NEWEST}/manifest.json")],
    "resuming a checkpoint with the manifest of another": [RUN, OTHER_MANIFEST],
    "resuming a checkpoint whose manifest has another step": [RUN, OTHER_STEP],
    "resuming a checkpoint with a file that is not of it": [RUN, write(f"{NEWEST}/.metadata")],
    "resuming a checkpoint of an earlier version": [RUN, write(f"{NEWEST}/manifest.json", '{"step":4,"checksums":{}}')],
    "checkpoints of which one is damaged": [RUN, cut(f"{NEWEST}/*.safetensors")],
    "checkpoints that are not there": [write("notes/text.txt")],
    "a text from a run without a checkpoint": [write("notes/text.txt")],
    "a text after an empty prompt": [RUN],
    "a text after a prompt that fills the context": [RUN],
    "a text with an impossible top-p": [RUN],
    "an answer without a chat template": [RUN],
    "a text from a checkpoint that is cut short": [RUN, cut(f"{NEWEST}/*.safetensors")],
    "a text from a module that is not known to predict tokens": [RUN, module_of_job("run/job.toml")],
    "a text from a folder without weights": [huggingface("llama")],
    "an export to a folder that is not empty": [RUN, write("notes/text.txt")],
    "an export to a file": [RUN],
    "an export to a full disk": [RUN, disk("size=8k")],
    "an export of a checkpoint that is not there": [write("notes/text.txt")],
    "an export of a checkpoint without its run": [RUN, remove("run/job.toml")],
    "an export of a checkpoint that is cut short": [RUN, cut(f"{NEWEST}/*.safetensors")],
    "an export in an unknown dtype": [RUN],
    "an export with a size that is no number": [RUN],
    "an export of adapters that the job does not have": [RUN],
    "an export of a model that transformers has not": [
        RUN,
        edit("run/job.toml", "rotary_fraction = 1.0", "rotary_fraction = 0.5"),
    ],
    "weights of a model with other sizes": [huggingface("llama")],
    "weights of a family that motet's decoder does not compute": [huggingface("gemma", model_type="gemma")],
    "adapters of another kind": [records("lora/adapter_config.json", {"peft_type": "LORA", "r": 8, "use_dora": True})],
    "a pattern that matches no tensor": [RUN],
    "two steps that are compared": [RUN],
    "the mean of one checkpoint": [RUN],
    "a mean of a damaged checkpoint": [RUN, cut(f"{NEWEST}/*.safetensors")],
    "a folder that dcp did not save": [write("notes/text.txt")],
    "a cast into a folder with files": [RUN, write("notes/text.txt")],
    "a folder without config.json": [write("llama/readme.md")],
    "an unknown model_type": [huggingface("llama", model_type="lama")],
    "a config that contradicts itself": [huggingface("llama", hidden_size=33)],
    "a config with a smaller vocabulary": [huggingface("llama", vocab_size=100)],
    "a config with a shorter context": [huggingface("llama", max_position_embeddings=16)],
    "a config with fewer classes than the data": [BERT_CLASSES, THREE_CLASSES],
    "an objective that is not the model's": [huggingface("llama")],
    "an argument that the config does not have": [huggingface("llama")],
    "weights that are cut short": [weights("llama", cut_short=True)],
    "weights with a missing tensor": [weights("llama", without="lm_head.weight")],
    "weights in a pickle": [huggingface("llama"), write("llama/pytorch_model.bin")],
    "a Program that is wrong": [write("wrong.json", gathering(0))],
    "a Program that reads what is not there": [write("early.json", gathering(1))],
    "a file that holds no Program": [write("text.json", "words")],
    "a Program that asks for less than its name": [lambda: Path("less.json").write_text(less(), encoding="utf-8")],
    "a Program of one rank": [records("alone.json", ALONE)],
    "a picture that is a folder": [lambda: Path("cache").mkdir()],
    "a file to be costed": [write("early.json", gathering())],
    "a start-up of ages": [cluster("ages.toml", alpha_s="1e308")],
    "a link that carries nothing": [cluster("still.toml", bandwidth_Bps="5e-324")],
    "more uplinks than can be computed": [cluster("wide.toml", more=WIDE)],
    "a full disk while saving": [disk("size=2m")],
    "a limit of file sizes while saving": [RUN, lambda: shutil.copytree(RUN, "disk/run"), limit_files(2**15)],
    "a full disk for the events": [disk("size=400k"), RUN, lambda: shutil.copytree(RUN, "disk/run")],
}
