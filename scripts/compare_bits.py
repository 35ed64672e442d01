"""Train twelve layouts of three models in two source trees, and compare the numbers bit by bit.

    python scripts/compare_bits.py OLD [NEW] [--only WORD ...] [--steps 4]

OLD and NEW are commits, or folders that hold the package `motet`; NEW is src/ of this repository if left out. A commit
is checked out in a temporary folder. Each tree trains with its own code, in its own processes, without dropout. The
losses and norms of all events are compared, and every tensor of all checkpoints, which motet reads by name:
parameters by their master copies. The state of compression is compared without its sync group, which older trees do not
name. Exits with 1 if anything differs.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from motet.checkpoint.data_files import CheckpointShard
from motet.checkpoint.loading import load_checkpoint
from motet.checkpoint.manifest import read_manifest

ROOT = Path(__file__).parents[1]
TWO, FOUR, SMALL_BUCKETS = "run.ranks=2", "run.ranks=4", "communication.bucket_mib=0.02"
LAYOUTS = {
    "zero=0": [TWO, SMALL_BUCKETS],
    "zero=0, overlap=forward": [TWO, SMALL_BUCKETS, "communication.overlap=forward"],
    "zero=1": [TWO, SMALL_BUCKETS, "layout.zero=1"],
    "zero=2, two micro-batches": [TWO, SMALL_BUCKETS, "layout.zero=2", "layout.microbatches=2"],
    "zero=2, two replicas, overlap=forward": [
        *(FOUR, SMALL_BUCKETS, "layout.zero=2", "layout.shard_group=2", "communication.overlap=forward"),
    ],
    "zero=2, reproducible": [TWO, SMALL_BUCKETS, "layout.zero=2", "run.reproducible=layout"],
    "zero=3": [TWO, "layout.zero=3"],
    "zero=3, small ones replicated, bf16": [
        *(TWO, "layout.zero=3", "layout.min_shard_numel=100", "precision.recipe=bf16"),
    ],
    "zero=3, two replicas, kept after forward, two micro-batches": [
        *(FOUR, "layout.zero=3", "layout.shard_group=2", "layout.reshard_after_forward=false", "layout.microbatches=2"),
    ],
    "zero=3, secondary shards, int8": [
        *(FOUR, "layout.zero=3", "layout.secondary_group=2", "communication.compress_gradients=int8"),
    ],
    "tp=2, split sequences, zero=2": [FOUR, "layout.tp=2", "layout.sp=true", "layout.dp=2", "layout.zero=2"],
    "pp=2, zero bubble": [TWO, "layout.pp=2", "layout.microbatches=4", "layout.schedule=zb-interleaved"],
}
COMMON = [
    *("data.tokenizer=bytes", "data.sequence_length=32", "data.batch_sequences=8", "data.workers=1"),
    *(f"data.source={ROOT / 'tests/data/small.txt'}", "optimizer.clip_norm=0.5", "run.device=cpu"),
    *("checkpoint.every=2", "checkpoint.keep=100", "monitor.evaluate_every=2", "monitor.sample_tokens=0"),
    *("monitor.tensorboard=false", "run.threads=1"),
]
DECODER = "vocab_size=260, context=32, layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48"
ENCODER = "vocab_size=260, context=40, layers=2, hidden=32, heads=4, ffn_hidden=48, dropout=0.0"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
MODELS = {  # Name -> job, and its model as a setting
    "decoder": ("tiny", f"model={{family='decoder', {DECODER}}}"),
    "encoder": ("bert-tiny", f"model={{family='encoder', head='masked', {ENCODER}}}"),
    "llama": ("tiny", "model={factory='hf:llama.json'}"),
}
EVENT_NUMBERS = ("loss", "grad_norm", "learning_rate", "target_tokens", "targets", "perplexity")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="TREE", help="OLD, and NEW unless it is this repository's src/")
    parser.add_argument("--only", nargs="+", default=[], help="words of which one is in `model: layout`")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    pairs = [(model, layout) for model in MODELS for layout in LAYOUTS]
    chosen = [pair for pair in pairs if not options.only or any(word in ": ".join(pair) for word in options.only)]
    equal, start = 0, time.monotonic()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))  # trains in both trees at the same time
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-bits-")))
        (folder / "llama.json").write_text(json.dumps(LLAMA))
        trees = [stack.enter_context(source_tree(tree)) for tree in [*options.trees, str(ROOT / "src")][:2]]
        for index, (model, layout) in enumerate(chosen):
            arguments = [*MODELS[model], *COMMON, *LAYOUTS[layout], f"run.steps={options.steps}"]
            try:
                old, new = pool.map(partial(train, folder, arguments), trees, (f"{index}-old", f"{index}-new"))
                difference = first_difference(old, new)
            except RuntimeError as error:
                difference = f"FAILED: {error}"
            equal += difference is None
            print(f"{model}: {layout}: {difference or f'equal: {len(old)} values'}", flush=True)
    print(f"{equal} of {len(chosen)} pairs are equal bit by bit ({time.monotonic() - start:.0f} s)")
    return int(not 0 < equal == len(chosen))


@contextmanager
def source_tree(tree: str) -> Iterator[Path]:
    """The folder of the package `motet` of a commit, or the given folder."""
    if Path(tree).is_dir():
        yield check_source(Path(tree).resolve())
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="compare-bits-tree-") as folder:
        subprocess.run([*git, "add", "--quiet", "--detach", folder, tree], check=True)
        try:
            yield check_source(Path(folder) / "src")
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def check_source(src: Path) -> Path:
    """Fail if another copy of the package would be imported."""
    command = [*python(src), "-c", "import motet; print(motet.__file__)"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(imported).is_relative_to(src):
        raise SystemExit(f"{src}: Python imports {imported or 'nothing'} instead")
    return src


def python(src: Path) -> list[str]:
    return ["env", f"PYTHONPATH={src}", "OMP_NUM_THREADS=1", sys.executable]


def train(folder: Path, arguments: list[str], src: Path, run: str) -> dict[str, Any]:
    """Train with the code of a source tree, and return its numbers by name."""
    command = ["-m", "motet", "train", *arguments, f"run.folder={run}", f"data.cache=cache-{run}"]
    result = subprocess.run([*python(src), *command], cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{src}: python {' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    events = [json.loads(line) for line in (folder / run / "events.jsonl").read_text().splitlines()]
    named = [(f"{e['event']} of step {e['step']}: {n}", e[n]) for e in events for n in EVENT_NUMBERS if n in e]
    checkpoints = sorted(path.parent for path in (folder / run / "checkpoints").glob("*/manifest.json"))
    assert named and checkpoints, "a run without numbers proves nothing"
    return dict(named) | {f"{path.name}: {n}": value for path in checkpoints for n, value in stored(path).items()}


def stored(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint by name, whichever version of motet wrote it."""
    manifest = read_manifest(checkpoint)
    shapes, dtypes = manifest.all_shapes, manifest.all_dtypes
    state = {name: torch.empty(shape, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()}
    load_checkpoint(checkpoint, {name: CheckpointShard.from_tensor(tensor) for name, tensor in state.items()}, None)
    named = {re.sub("^carried/.*/", "carried/", name): value for name, value in state.items()}
    assert len(named) == len(state), f"{checkpoint}: the state of compression of several sync groups cannot be compared"
    return named


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first value that differs, and how many do; None if all bits are the same."""
    names = [name for name in {**old, **new} if name not in old or name not in new or not same(old[name], new[name])]
    return f"DIFFERENT: {len(names)} of {len({**old, **new})} values, first {names[0]}" if names else None


def same(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return repr(a) == repr(b)
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


if __name__ == "__main__":
    sys.exit(main())
