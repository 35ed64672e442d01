"""A step with compiled blocks: motet against its eager blocks, and against blocks that plain PyTorch compiles.

All contenders train the model of the job `tiny` on the same batches in the same rank processes, a few steps each in
turn; a round gives one ratio per pair, and medians and quartiles over the rounds are printed. One rank has plain
PyTorch as its peer. Two ranks have DDP, and at stage 3 FSDP2; blocks of the peers are compiled one by one as well, with
`block.compile(fullgraph=True)` before they are wrapped. Then new processes train one step: with an empty cache of
compiled code, with the cache that the first of them left, and eager.

    python benchmarks/compiled_blocks.py [--rounds 15] [--starts 3] [--page]

--page writes docs/benchmarks/compiled-blocks.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from parts.arguments import parse_arguments
from parts.rank_processes import launch
from parts.report.pages import DOCS, collected_results, fill, load_of_machine, store_result, table
from parts.rounds import interleave, progress, ratio_text
from train_step import LENGTH, ROWS, Runner, module_of, motet_runner, timed_loop

PAGE = DOCS / "compiled-blocks.md"
COMPILED = "run.compile=blocks"
# Ranks and threads -> the settings of motet, by its name in the table, and the peers.
WAYS: dict[tuple[int, int], tuple[dict[str, list[str]], list[str]]] = {
    (1, 2): ({"motet": [], "motet, compiled": [COMPILED]}, ["plain PyTorch", "plain PyTorch, compiled"]),
    (2, 1): (
        {
            "motet": [],
            "motet, compiled": [COMPILED],
            "motet, stage 3": ["layout.zero=3"],
            "motet, stage 3, compiled": ["layout.zero=3", COMPILED],
        },
        ["DDP, compiled", "FSDP2, compiled"],
    ),
}
# Ranks -> pairs of which a ratio is shown: how much longer the first one takes than the second.
PAIRS = {
    1: [
        ("motet", "motet, compiled"),
        ("plain PyTorch", "plain PyTorch, compiled"),
        ("plain PyTorch, compiled", "motet, compiled"),
    ],
    2: [
        ("motet", "motet, compiled"),
        ("motet, stage 3", "motet, stage 3, compiled"),
        ("DDP, compiled", "motet, compiled"),
        ("FSDP2, compiled", "motet, stage 3, compiled"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=3, help="new processes of each kind")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=1, starts=1)
    if "RANK" in os.environ:
        measure(options)
        return
    load = load_of_machine()
    with collected_results() as rows:
        code = max(launch(world, threads, ["--threads", str(threads)]) for world, threads in WAYS)
    starts = measure_starts(options.starts)
    if code == 0 and options.page:
        steps = table(["ranks x threads", "longer", "shorter", "ratio of step times (quartiles)", "steps in s"], rows)
        first = table(["first step of a process", "seconds"], starts)
        fill(PAGE, [f"Model `tiny` in float32, {options.rounds} rounds. {load}", steps, first])
    sys.exit(code)


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from motet.cluster.host_limits import keep_freed_memory

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    dist.init_process_group("gloo")
    ours, peers = WAYS[(dist.get_world_size(), options.threads)]
    runners = {name: motet_runner("tiny", "fp32", *settings) for name, settings in ours.items()}
    runners |= {name: peer_runner(name) for name in peers}
    for name, run in runners.items():
        progress(f"first steps of {name}")
        run()

    def one_round(name: str) -> float:
        dist.barrier()
        return statistics.median(runners[name]()[0])

    times = interleave({name: partial(one_round, name) for name in runners}, options.rounds)
    if dist.get_rank() == 0:
        report(dist.get_world_size(), options.threads, times)
    dist.destroy_process_group()


def report(ranks: int, threads: int, times: dict[str, list[float]]) -> None:
    for longer, shorter in PAIRS[ranks]:
        seconds = " and ".join(f"{statistics.median(times[name]):.3f}" for name in (longer, shorter))
        row = [f"{ranks} x {threads}", longer, shorter, ratio_text(times[longer], times[shorter], digits=3), seconds]
        store_result(row)
        print(" | ".join(row), flush=True)


def peer_runner(name: str) -> Runner:
    """The loop of a training script around the same module, whose blocks may be compiled."""
    from torch.nn.parallel import DistributedDataParallel

    module: Any = module_of("tiny")
    if name.endswith("compiled"):
        for block in module.blocks:
            block.compile(fullgraph=True, dynamic=False)
    if name.startswith("FSDP2"):
        from torch.distributed.fsdp import fully_shard

        for each in (*module.blocks, module):
            fully_shard(each)
    elif name.startswith("DDP"):
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return timed_loop(module, "fp32")


def measure_starts(count: int) -> list[list[str]]:
    """The seconds of the first step of new processes."""
    seconds: dict[str, list[float]] = {"eager": [], "compiled, with an empty cache": [], "compiled, cached": []}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            for name, times in seconds.items():
                setting = "off" if name == "eager" else "blocks"
                times.append(_first_step_s(cache, f"run.compile={setting}"))
    rows = [[name, f"{statistics.median(times):.1f}"] for name, times in seconds.items()]
    for row in rows:
        print(" | ".join(row), flush=True)
    return rows


def _first_step_s(cache: str, setting: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        common = ["run.steps=1", f"run.folder={folder}/run", "run.threads=2", "run.device=cpu", "monitor.predict=false"]
        sizes = [f"data.batch_sequences={ROWS}", f"data.sequence_length={LENGTH}", "monitor.sample_tokens=0"]
        command = [sys.executable, "-m", "motet", "train", "tiny", *common, *sizes, setting, "--ranks", "1"]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "2"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = Path(folder, "run/events.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step_done"]
        return float(steps[0]["step_time_s"])


if __name__ == "__main__":
    main()
