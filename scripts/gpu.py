"""Checks on a CUDA device: parity with the CPU, speed, and resuming; writes docs/benchmarks/gpu-NAME.md.

Small jobs have the same numbers in float64 on the CPU and on CUDA; the built-in job `tiny` trains in bfloat16; a run
that is stopped and resumed ends with the same bits as one that is not. As many devices are used as there are and as
divide the batch. Ends with 0 when all holds, 1 when something does not, 2 without a CUDA device.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from motet.parallel.process.launch_environment import RankEnvironment  # noqa: E402
from motet.parallel.process.process_group import pick_device, start_process_group  # noqa: E402
from motet.train.job import Job  # noqa: E402
from ranks import RankFailureError, Ranks  # noqa: E402
from train.runs import Trained, same_bits, saved_tensors, small_job, train, worst_difference  # noqa: E402

Kind = Literal["cpu", "cuda"]

MODELS = ("decoder", "llama", "gpt2", "bert", "t5")
DROPOUT = ("gpt2", "bert")
PARITY_STEPS = 10
LARGEST_DIFFERENCE = 1e-9
"""Other kernels add in another order, and each step begins where rounding has led the one before."""
BATCH = 16
"""Of `tiny` and of the parity jobs: the number of ranks divides it."""
SPEED_STEPS = 30
RESUME_STEPS, STOP_AT = 20, 10


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    result: str
    holds: bool | None
    """None: a number, not a verdict."""


def ranks_for(devices: int) -> int:
    """The largest number of ranks that the devices allow and that divides the batch."""
    return max(n for n in range(1, max(devices, 1) + 1) if BATCH % n == 0)


# --- parity ----------------------------------------------------------------------------------------


def train_on(place: RankEnvironment, kind: Kind, job: Job) -> Trained:
    """The first steps of a job on this rank's device."""
    with warnings.catch_warnings(), start_process_group(place, pick_device(kind, place), timeout_s=120) as group:
        warnings.simplefilter("default")  # in tests they are errors; what is asked here is whether the numbers agree
        return train(group, job, PARITY_STEPS)


def parity(pool: Ranks, kind: Kind, world: int, folder: Path) -> Iterable[Row]:
    """Every rank on `kind` against one rank on the CPU; and with dropout, in micro-batches, against one on `kind`."""
    steps = f"float64, {PARITY_STEPS} steps of a small"
    for model in MODELS:
        job = small_job(folder, f"data.batch_sequences={BATCH}", model=model)
        check = f"{steps} {model}, {world} x {kind} against cpu: largest difference"
        yield compared(check, pool, ("cpu", 1, job), (kind, world, job))
    for model in DROPOUT:
        whole, parts = (
            small_job(folder, f"data.batch_sequences={BATCH}", f"layout.microbatches={n}", model=model)
            for n in (1, BATCH // world)
        )
        check = f"{steps} {model} with dropout, {world} x {kind} row by row against one: largest difference"
        yield compared(check, pool, (kind, 1, whole), (kind, world, parts))


def compared(check: str, pool: Ranks, expected: tuple[Kind, int, Job], found: tuple[Kind, int, Job]) -> Row:
    """Each: where, on how many ranks, what."""
    try:
        (reference, *_), every = (
            pool.run_places(world, train_on, kind, job, timeout_s=300) for kind, world, job in (expected, found)
        )
    except RankFailureError as error:
        return failed(check, str(error))
    worst = max(worst_difference(trained, reference) for trained in every)
    return Row(check, f"{worst:.1e} (limit {LARGEST_DIFFERENCE:.0e})", worst <= LARGEST_DIFFERENCE)


# --- whole runs ------------------------------------------------------------------------------------


def motet_train(kind: Kind, world: int, *arguments: str) -> dict[str, Any]:
    """The summary of a run of the command, or a RuntimeError with its last words."""
    command = [sys.executable, "-m", "motet", "train", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"motet train ended with exit code {done.returncode}")
    summary: dict[str, Any] = json.loads(done.stdout)
    if summary["ranks"] != world:
        raise RuntimeError(f"asked for {world} ranks on {kind}, the run had {summary['ranks']}")
    return summary


def tiny(kind: Kind, world: int, folder: Path, *changes: str) -> dict[str, Any]:
    """A run of `tiny` in bfloat16, with as little beside its steps as can be."""
    job = [f"run.device={kind}", f"run.ranks={world}", f"data.batch_sequences={BATCH}", "precision.recipe=bf16"]
    quiet = ["monitor.tensorboard=false", "monitor.sample_tokens=0", "monitor.evaluate_every=1000000"]
    return motet_train(kind, world, "tiny", *job, *quiet, *changes, "--run-folder", str(folder))


def speed(kind: Kind, world: int, folder: Path, *changes: str) -> Iterable[Row]:
    """Tokens a second and the share of the peak, medians over the steps."""
    check = f"bf16, {SPEED_STEPS} steps of `tiny`, {world} x {kind}"
    try:
        told = tiny(kind, world, folder / "speed", f"run.steps={SPEED_STEPS}", *changes)
    except RuntimeError as error:
        yield failed(check, str(error))
        return
    share = told["mfu"]
    yield Row(f"{check}: loss", f"{told['first_loss']:.3f} -> {told['final_loss']:.3f}", learns(told))
    yield Row(f"{check}: tokens/s", f"{told['tokens_per_s']:,.0f}", None)
    yield Row(f"{check}: share of peak", "peak of this device not known" if share is None else f"{share:.2%}", None)


def learns(told: dict[str, Any]) -> bool:
    """Non-finite losses are texts in a summary."""
    first, final = told["first_loss"], told["final_loss"]
    return isinstance(first, float) and isinstance(final, float) and final < first


def resume(kind: Kind, world: int, folder: Path, *changes: str) -> Iterable[Row]:
    """Stopped half-way and resumed, against undisturbed: everything in the last checkpoint."""
    check = f"bf16, `tiny` stopped after {STOP_AT} of {RESUME_STEPS} steps and resumed, {world} x {kind}: same bits"
    whole, halves = folder / "whole", folder / "halves"
    steps = [f"run.steps={RESUME_STEPS}", *changes]
    try:
        tiny(kind, world, whole, *steps)
        half = tiny(kind, world, halves, *steps, f"run.stop_at={STOP_AT}")
        if half["steps"] != STOP_AT:
            raise RuntimeError(f"the run stopped after {half['steps']} steps")
        motet_train(kind, world, "--resume-from", str(halves))
    except RuntimeError as error:
        yield failed(check, str(error))
        return
    same = same_bits(saved_tensors(halves), saved_tensors(whole))
    yield Row(check, "yes" if same else "no", same)


def failed(check: str, message: str) -> Row:
    """The last line of what a command or a rank said fits into a table."""
    print(message, file=sys.stderr)
    return Row(check, f"failed: {message.strip().splitlines()[-1]}", False)


# --- the page --------------------------------------------------------------------------------------


def commit() -> str:
    """The commit that was measured, and whether files differed from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "")


def slug(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def page(device: str, world: int, rows: list[Row]) -> str:
    """The results, and all that is needed to compare them with others."""
    verdicts = {True: "holds", False: "**does not hold**", None: ""}
    cells = [(row.check, row.result.replace("|", "\\|"), verdicts[row.holds]) for row in rows]
    facts = {
        "Device": f"{device} ({world} used)",
        "Machine": f"{platform.node()}, {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Date": datetime.now(UTC).date().isoformat(),
        "Commit": commit(),
    }
    lines = [f"# {device}", "", "Made by `make gpu`.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| check | result | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells), ""]
    return "\n".join(lines)


def checks(kind: Kind, world: int, folder: Path, *changes: str) -> Iterable[Row]:
    """All rows, each told as soon as it is known. `changes` are overrides for the runs of `tiny`."""
    pool = Ranks()
    try:
        yield from parity(pool, kind, world, folder)
    finally:
        pool.close()
    yield from speed(kind, world, folder, *changes)
    yield from resume(kind, world, folder, *changes)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device was found, so nothing can be checked on one", file=sys.stderr)
        return 2
    device, world = torch.cuda.get_device_name(), ranks_for(torch.cuda.device_count())
    print(f"{device}, {world} of {torch.cuda.device_count()} used")
    rows = []
    with tempfile.TemporaryDirectory(prefix="motet-gpu-") as folder:
        for row in checks("cuda", world, Path(folder)):
            print(f"{row.check}: {row.result}{'' if row.holds is not False else '  DOES NOT HOLD'}", flush=True)
            rows.append(row)
    path = ROOT / "docs/benchmarks" / f"gpu-{slug(device)}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(device, world, rows))
    print(f"written to {path.relative_to(ROOT)}")
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    import gpu  # ranks load `train_on` by its module, which must not be `__main__`

    sys.exit(gpu.main())
