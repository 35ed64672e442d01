"""Tokens per second of a training step: motet, a hand-written DDP loop, Accelerate and Lightning.

All of them train the same model class from the same values on the same batches, in the same rank processes, a few steps
each in turn; a round gives one ratio per peer, and medians and lower quartiles over the rounds are printed. All use a
fused AdamW, clip by global norm and, for bf16, follow the advice of their manuals: autocast for the peers, the recipe
bf16 for motet. The peers compute logits and `F.cross_entropy`, as a training script does.

    python benchmarks/train_step.py [--ranks 2 --threads 1] [--rounds 15] [--dtypes fp32 bf16] [--model tiny|llama-hf]
                                    [--page]

Without --ranks, 2 ranks x 1 thread and 1 rank x 2 threads are measured one after the other. --page writes
docs/benchmarks/train-step.md.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from parts.arguments import parse_arguments
from parts.rank_processes import launch
from parts.report.pages import DOCS, collected_results, fill, store_result, table
from parts.rounds import interleave, quartiles, ratios

STEPS = 6
WARM_UP = 2
ROWS, LENGTH = 16, 256
LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
WORDS = {
    "motet": "**motet**",
    "ddp": "hand-written DDP loop",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
}
PAGE = DOCS / "train-step.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--model", choices=["tiny", "llama-hf"], default="tiny")
    parser.add_argument("--peers", nargs="+", default=["ddp", "accelerate", "lightning"])
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, ranks=2, rounds=1, dtypes=["fp32"], peers=["ddp"])
    if "RANK" in os.environ:
        measure(options)
        return
    sizes = [(options.ranks, options.threads)] if options.ranks else [(2, 1), (1, 2)]
    with collected_results() as rows:
        code = max(start(*size) for size in sizes)
    if code == 0 and options.page:
        versions = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "lightning") if name in options.peers)
        heads = ["ranks x threads", "dtype", "", "tokens/s", "motet is (median)", "quartiles", "loss"]
        fill(PAGE, [f"Model `{options.model}`; {options.rounds} rounds; {versions}.", table(heads, rows)])
    sys.exit(code)


def start(world: int, threads: int) -> int:
    """Start the ranks and wait for them."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    return launch(world, threads, ["--ranks", str(world), "--threads", str(threads)])


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    leads = dist.get_rank() == 0
    for dtype in options.dtypes:
        runners = {"motet": motet_runner(options.model, dtype)}
        runners |= {name: PEERS[name](options.model, dtype) for name in options.peers}

        def one_round(name: str) -> tuple[float, float]:
            _allocate_as(name)
            dist.barrier()
            seconds, loss = runners[name]()  # noqa: B023 - called in this iteration
            return statistics.median(seconds), loss

        results = interleave({name: partial(one_round, name) for name in runners}, options.rounds, stride=0)
        times = {name: [seconds for seconds, _ in rounds] for name, rounds in results.items()}
        last_loss = {name: rounds[-1][1] for name, rounds in results.items()}
        if leads:
            report(options, dtype, times, last_loss)
    dist.destroy_process_group()


def _allocate_as(name: str) -> None:
    """motet keeps freed memory; the peers leave the allocator alone, whose thresholds then settle at 32 and 64 MiB."""
    from motet.cluster.host_limits import keep_freed_memory

    if keep_freed_memory() and name != "motet":
        ctypes.CDLL(None).mallopt(-1, 64 << 20)


def report(options: argparse.Namespace, dtype: str, times: dict[str, list[float]], losses: dict[str, float]) -> None:
    tokens, ours = ROWS * LENGTH, times["motet"]
    print(f"\n{options.model}, {dtype}, {options.ranks} ranks x {options.threads} threads, {options.rounds} rounds")
    for name, seconds in times.items():
        low, middle, high = quartiles(ratios(seconds, ours))
        compared = ["", ""] if name == "motet" else [f"{middle:.2f}x", f"{low:.2f} to {high:.2f}"]
        speed = f"{tokens / statistics.median(seconds):,.0f}"
        row = [f"{options.ranks} x {options.threads}", dtype, WORDS[name], speed, *compared, f"{losses[name]:.3f}"]
        store_result(row)
        print(" | ".join(row), flush=True)


# --- shared by all contenders --------------------------------------------------------------------------

Runner = Callable[[], tuple[list[float], float]]
"""Does WARM_UP + STEPS steps, returns the seconds of the last STEPS and the last loss."""


def settings_of(model: str) -> Any:
    from motet import load_job

    if model == "tiny":
        return load_job("tiny").model
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 256,
        "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
    }  # fmt: skip
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="motet-bench-"))
    (folder / "config.json").write_text(json.dumps(config))
    return load_job("tiny", [f'model={{factory="hf:{folder}"}}']).model


def module_of(model: str) -> Any:
    """A fresh module in float32 with values from the seed."""
    import torch

    from motet.models.build import build_trainable_model

    return build_trainable_model(settings_of(model), 0, torch.float32, torch.device("cpu")).module


def batches() -> list[Any]:
    """This rank's tokens of each step: a few batches, again and again, so that the loss must fall."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(7)
    whole = torch.randint(0, 4096, (4, ROWS, LENGTH + 1), generator=generator)
    share = ROWS // dist.get_world_size()
    first = dist.get_rank() * share
    return list(whole[:, first : first + share])


def logits_of(output: Any) -> Any:
    return output.logits if hasattr(output, "logits") else output


def loss_of(output: Any, tokens: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits_of(output).float().flatten(0, 1), tokens[:, 1:].flatten())


def adamw(module: Any) -> Any:
    import torch

    wide = [p for p in module.parameters() if p.ndim > 1]
    narrow = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def timed(step: Callable[[Any], float]) -> Runner:
    """A runner from a function that does one step on a batch and returns the loss."""
    data, at = batches(), [0]

    def run() -> tuple[list[float], float]:
        seconds, loss = [], 0.0
        for _ in range(WARM_UP + STEPS):
            start = time.perf_counter()
            loss = step(data[at[0] % len(data)])
            seconds.append(time.perf_counter() - start)
            at[0] += 1
        return seconds[WARM_UP:], loss

    return run


# --- the four -----------------------------------------------------------------------------------------


def motet_runner(model: str, dtype: str, *overrides: str) -> Runner:
    import torch
    import torch.distributed as dist

    from motet import load_job
    from motet.core.batch import Batch
    from motet.models.build import build_trainable_model
    from motet.parallel.process.process_group import RankGroup
    from motet.train.engine import build_engine
    from motet.train.step import MicroBatchLoop, TrainStep

    group = RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    trainee = build_trainable_model(settings_of(model), 0, torch.float32, group.device)
    common = [f"precision.recipe={dtype}", f"optimizer.clip_norm={CLIP_NORM}", f"data.batch_sequences={ROWS}"]
    job = load_job("tiny", [*common, *overrides])
    layout = job.layout_for(group.world)
    engine = build_engine(trainee.module, group, layout=layout, settings=job, batch_sequences=ROWS)
    parameters = engine.optimizer.sharded_parameters
    trainee = replace(trainee, loss_sum=parameters.wrap_as_forward(trainee.loss_sum))

    class Samples:
        tokens: Any = None

        def batch(self, step: int, rows: range) -> Batch:
            weights = torch.ones(len(rows), LENGTH)
            return Batch(self.tokens[:, :-1], self.tokens[:, 1:], weights, torch.arange(rows.start, rows.stop))

    samples = Samples()
    stepper = TrainStep(engine, MicroBatchLoop(trainee, samples, engine, layout, ROWS))

    def step(tokens: Any) -> float:
        samples.tokens = tokens
        return stepper.step(0, LEARNING_RATE).loss

    return timed(step)


def ddp_runner(model: str, dtype: str) -> Runner:
    from torch.nn.parallel import DistributedDataParallel

    return timed_loop(DistributedDataParallel(module_of(model), gradient_as_bucket_view=True), dtype)


def timed_loop(module: Any, dtype: str) -> Runner:
    """The loop of a training script, which knows no framework."""
    import torch

    optimizer = adamw(module)

    def step(tokens: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = loss_of(module(tokens[:, :-1]), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return timed(step)


def accelerate_runner(model: str, dtype: str) -> Runner:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.nn.parallel import DistributedDataParallel

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if dtype == "bf16" else "no")
    plain = module_of(model)
    module, optimizer = accelerator.prepare(plain, adamw(plain))
    assert accelerator.num_processes == 1 or isinstance(module, DistributedDataParallel), "no data parallelism"

    def step(tokens: Any) -> float:
        with accelerator.autocast():
            loss = loss_of(module(tokens[:, :-1]), tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return timed(step)


def lightning_runner(model: str, dtype: str) -> Runner:
    import logging

    import lightning
    import torch
    import torch.distributed as dist

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: list[float] = []

    class Wrapped(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module_of(model)
            self.optimizer = adamw(self.inner)
            self.loss = 0.0

        def training_step(self, tokens: Any, index: int) -> Any:
            loss = loss_of(self.inner(tokens[:, :-1]), tokens)
            self.loss = float(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            # Lightning's own refuses a fused optimizer under mixed precision.
            torch.nn.utils.clip_grad_norm_(self.inner.parameters(), CLIP_NORM)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            seconds.append(time.perf_counter() - self.start)

    wrapped, data, at = Wrapped(), batches(), [0]

    def run() -> tuple[list[float], float]:
        seconds.clear()
        chosen = [data[(at[0] + i) % len(data)] for i in range(WARM_UP + STEPS)]
        at[0] += len(chosen)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, logger=False,
            precision="bf16-mixed" if dtype == "bf16" else "32-true", gradient_clip_val=CLIP_NORM,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(wrapped, torch.utils.data.DataLoader(chosen, batch_size=None))
        return seconds[WARM_UP:], wrapped.loss

    return run


PEERS: dict[str, Callable[[str, str], Runner]] = {
    "ddp": ddp_runner,
    "accelerate": accelerate_runner,
    "lightning": lightning_runner,
}

if __name__ == "__main__":
    main()
