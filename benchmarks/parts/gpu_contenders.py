"""One decoder, one batch and one AdamW on one device, trained by motet and by its peers.

A contender is a function that trains on some batches, and returns the seconds of each step and the last loss. All have
float32 masters and compute in bf16: motet by its recipe, the others under autocast, as their manuals say.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, BETAS, EPS, DECAY, CLIP_NORM, THETA, NORM_EPS = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 10000.0, 1e-5
Contender = Callable[[Sequence[Tensor]], tuple[list[float], float]]


class AbsentError(Exception):
    """A peer cannot run here; the text says why."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of a batch."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    rows: int
    length: int

    @property
    def parameters(self) -> int:
        """The parameters of the model that all contenders train."""
        projections = 2 * self.hidden + 2 * self.hidden * self.kv_heads // self.heads
        block = self.hidden * (projections + 3 * self.ffn + 2)
        return self.layers * block + (2 * self.vocabulary + 1) * self.hidden

    def checked(self, module: nn.Module) -> nn.Module:
        """The module, if it has this number of parameters."""
        count = sum(parameter.numel() for parameter in module.parameters())
        if count != self.parameters:
            raise AbsentError(f"its model has {count:,} parameters, and the others have {self.parameters:,}")
        return module

    def batches(self, count: int, device: torch.device) -> list[Tensor]:
        """[rows, length + 1] tokens of each batch, the same for all contenders."""
        generator = torch.Generator().manual_seed(7)
        shape = (count, self.rows, self.length + 1)
        return list(torch.randint(self.vocabulary, shape, generator=generator).to(device))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[Any], Tensor | float], device: torch.device) -> Callable[[Sequence[Any]], Any]:
    """A contender from a function that takes one step of a batch."""

    def run(batches: Sequence[Any]) -> tuple[list[float], float]:
        seconds, loss = list[float](), torch.tensor(0.0)
        for batch in batches:
            wait(device)
            start_s = time.perf_counter()
            loss = torch.as_tensor(step(batch)).detach()
            wait(device)
            seconds.append(time.perf_counter() - start_s)
        return seconds, float(loss)

    return run


# --- motet ---------------------------------------------------------------------------------------------


def job_of(shape: Shape, device: torch.device, *, compiles: bool = False) -> Any:
    """The job of motet."""
    from motet.train.job import load_job

    sizes = f"layers={shape.layers}, hidden={shape.hidden}, heads={shape.heads}, kv_heads={shape.kv_heads}"
    more = f"ffn_hidden={shape.ffn}, vocab_size={shape.vocabulary}, context={shape.length}, tied=false"
    settings = [
        *(f"model={{family='decoder', {sizes}, {more}}}", "data.tokenizer=bytes", f"run.device={device.type}"),
        *(f"data.sequence_length={shape.length}", f"data.batch_sequences={shape.rows}", "precision.recipe=bf16"),
        *("run.steps=100", "run.ranks=1", "data.restart_documents=false", f"optimizer.weight_decay={DECAY}"),
        f"run.compile={'blocks' if compiles else 'off'}",
    ]
    return load_job("tiny", settings)


def flops_of_step(shape: Shape) -> float:
    """FLOPs of a step, without any that is repeated."""
    from motet.train.job import training_flops

    flops = training_flops(job_of(shape, torch.device("cpu")))
    assert flops is not None
    return flops


def motet(shape: Shape, device: torch.device, *, compiles: bool = False) -> Contender:
    """motet's engine with the settings of a job, on one rank."""
    from motet.core.batch import Batch
    from motet.models.build import build_trainable_model
    from motet.parallel.process.process_group import RankGroup
    from motet.train.build import precision_context
    from motet.train.engine import build_engine
    from motet.train.step import MicroBatchLoop, TrainStep

    job = job_of(shape, device, compiles=compiles)
    group, layout = RankGroup(0, 1, None, device), job.layout_for(1)
    model = build_trainable_model(job.model, 0, torch.float32, device)
    engine = build_engine(shape.checked(model.module), group, layout=layout, settings=job, batch_sequences=shape.rows)

    class Samples:
        """Batches on the host, pinned, as a run reads them ahead of its steps: there it counts their targets."""

        current: Batch

        def batch(self, step: int, rows: range) -> Batch:
            return self.current

    def on_host(tokens: Tensor) -> Batch:
        host, weights = tokens.cpu(), torch.ones(shape.rows, shape.length)
        batch = Batch(host[:, :-1].contiguous(), host[:, 1:].contiguous(), weights, torch.arange(shape.rows))
        return batch.pinned() if device.type == "cuda" else batch

    samples = Samples()
    stepper = TrainStep(engine, MicroBatchLoop(model, samples, engine, layout, shape.rows))

    def step(batch: Batch) -> float:
        samples.current = batch
        return stepper.step(0, RATE).loss

    inner = timed(step, device)

    def run(batches: Sequence[Tensor]) -> tuple[list[float], float]:
        on_hosts = [on_host(tokens) for tokens in batches]
        with precision_context(job, device):
            return inner(on_hosts)

    return run


# --- plain PyTorch -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm block with grouped queries, rotary positions and a gated feed-forward network."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = s.heads, s.kv_heads, s.hidden // s.heads
        self.norms = nn.ModuleList(nn.RMSNorm(s.hidden, NORM_EPS) for _ in range(2))
        self.qkv = nn.Linear(s.hidden, (s.heads + 2 * s.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)
        self.up, self.down = nn.Linear(s.hidden, 2 * s.ffn, bias=False), nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = (_rotated(each, cos, sin) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class Decoder(nn.Module):
    """A decoder as a training script writes it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.hidden, NORM_EPS), nn.Linear(s.hidden, s.vocabulary, bias=False)
        self.dim = s.hidden // s.heads
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        frequencies = THETA ** -(torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        angles = places[:, None] * frequencies
        x, cos, sin = self.embedding(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    wide, narrow = ([p for p in module.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, fused=True)


def plain(shape: Shape, device: torch.device, *, compiles: bool = False) -> Contender:
    """A loop of a training script under autocast, with the complete model compiled or not."""
    with torch.device(device):
        module: Any = shape.checked(Decoder(shape))
    optimizer = adamw(module)
    compute = torch.compile(module) if compiles else module

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = compute(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return timed(step, device)


# --- transformers, with and without Liger's kernels ------------------------------------------------------


@contextmanager
def unpatched_after(module: Any) -> Iterator[None]:
    """Let Liger replace names of a file of transformers, which all models of the process read, inside alone."""
    names, forward = dict(vars(module)), module.LlamaForCausalLM.forward
    try:
        yield
    finally:
        vars(module).update(names)
        module.LlamaForCausalLM.forward = forward


def trainer_with_liger(shape: Shape, device: torch.device) -> Contender:
    """The same Trainer, which lets Liger replace the layers of its model before it trains."""
    if find_spec("liger_kernel") is None:
        raise AbsentError("liger_kernel is not installed")
    if device.type != "cuda":
        raise AbsentError("its kernels need a GPU")
    return trainer(shape, device, liger=True)


def trainer(shape: Shape, device: torch.device, *, liger: bool = False) -> Contender:
    """transformers' Trainer with its Llama. Its loss has one target fewer in each row."""
    for name in ("transformers", "accelerate"):
        if find_spec(name) is None:
            raise AbsentError(f"{name} is not installed")
    import transformers
    from torch.utils.data import DataLoader
    from transformers.models.llama import modeling_llama

    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        module: Any = shape.checked(transformers.LlamaForCausalLM(config))
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    seconds, last = list[float](), [torch.tensor(0.0)]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait(device)
            self.start_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait(device)
            seconds.append(time.perf_counter() - self.start_s)

    class Runner(transformers.Trainer):
        batches: Sequence[Tensor]

        def get_train_dataloader(self) -> Any:
            return DataLoader([{"input_ids": t[:, :-1], "labels": t[:, :-1]} for t in self.batches], batch_size=None)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            last[0] = loss.detach() if isinstance(loss, Tensor) else loss[0].detach()
            return loss

    def run(batches: Sequence[Tensor]) -> tuple[list[float], float]:
        seconds.clear()
        arguments = transformers.TrainingArguments(
            output_dir="/nonexistent", max_steps=len(batches), per_device_train_batch_size=shape.rows, bf16=True,
            max_grad_norm=CLIP_NORM, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=device.type == "cpu", use_liger_kernel=liger, dataloader_pin_memory=False,
        )  # fmt: skip
        runner = Runner(module, arguments, train_dataset=[0], optimizers=(optimizer, schedule), callbacks=[Clock()])
        runner.remove_callback(transformers.PrinterCallback)
        runner.batches = batches
        with unpatched_after(modeling_llama):
            runner.train()
        return [*seconds], float(last[0])

    return run


CONTENDERS: dict[str, Callable[[Shape, torch.device], Contender]] = {
    "motet": motet,
    "motet, compiled blocks": lambda shape, device: motet(shape, device, compiles=True),
    "plain PyTorch": plain,
    "plain PyTorch, compiled": lambda shape, device: plain(shape, device, compiles=True),
    "transformers' Trainer": trainer,
    "Trainer with Liger": trainer_with_liger,
}


def make(name: str, shape: Shape, device: torch.device) -> tuple[Contender, float] | str:
    """A contender after its first two steps, and the seconds of the first one; or why it does not run here."""
    warnings.filterwarnings("ignore")
    try:
        contender = CONTENDERS[name](shape, device)
        seconds, _ = contender(shape.batches(2, device))
    except AbsentError as reason:
        return str(reason)
    except Exception as problem:  # noqa: BLE001  # a peer may fail in any way, and the others still run
        return failure_text(problem)
    return contender, seconds[0]


def failure_text(problem: Exception) -> str:
    return f"it failed: {type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
