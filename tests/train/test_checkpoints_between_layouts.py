"""A checkpoint that was written while one layout trained goes on in another: the same bits, and then the same losses.

Each pair of a stage, a degree, a place of the states and a way to save, before and after, stands in some case.
"""

import shutil
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from covering_array import Case, covering_array, uncovered_pairs
from motet.monitor.events import read_steps
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job

SAVED, STOPPED, LAST = 3, 5, 13  # Steps: ten losses follow the checkpoint, which training went past
TOLERANCE = 1e-12
MAX_RANKS = 8
MODEL = (
    "model.kv_heads=4",
    "model.vocab_size=261",
    "model.dropout=0.1",
    "model.layers=4",
)  # Two ranks pad the vocabulary
LAYOUT = {"zero": (0, 1, 2, 3), "tp": (1, 2), "pp": (1, 2), "dp": (1, 2, 3), "states": ("device", "host", "disk")}
FACTORS = {f"{when} {name}": values for when in ("before", "after") for name, values in LAYOUT.items()}
FACTORS["mode"] = ("async", "sync")


def _layout(case: Case, when: str) -> dict[str, int | str]:
    return {name: case[f"{when} {name}"] for name in LAYOUT}


def _ranks(layout: Case) -> int:
    return int(layout["tp"] * layout["pp"] * layout["dp"])


def is_possible(case: Case) -> bool:
    before, after = _layout(case, "before"), _layout(case, "after")
    return before != after and all(_ranks(layout) <= MAX_RANKS for layout in (before, after))


CASES = covering_array(FACTORS, is_possible)
SMALL = dict(zip(FACTORS, (3, 1, 1, 2, "host", 1, 1, 1, 1, "device", "async"), strict=True))


def _name(case: Case) -> str:
    sides = (" ".join(f"{name}={value}" for name, value in _layout(case, w).items()) for w in ("before", "after"))
    return f"{case['mode']} {' to '.join(sides)}"


def _job(folder: Path, layout: Case, *others: str) -> Job:
    degrees = [f"layout.{name}={layout[name]}" for name in ("zero", "tp", "pp", "dp")]
    states = [f"memory.optimizer={layout['states']}"] if layout["states"] != "device" else []
    states += [f"memory.folder={folder}"] if layout["states"] == "disk" else []
    steps = f"run.steps={LAST}", f"checkpoint.every={SAVED}", "checkpoint.keep=9", "layout.microbatches=2"
    return small_job(folder, *MODEL, *steps, *degrees, *states, *others)


@cache
def _undisturbed_losses(ranks: Ranks, folder: Path) -> list[float]:
    job = small_job(folder, *MODEL, f"run.steps={LAST}")
    ranks.run_places(1, run_job, job, folder / "undisturbed", timeout_s=240)
    return [step.loss for step in read_steps(folder / "undisturbed/events.jsonl")]


def _restore_and_save(group: RankGroup, job: Job, run: str, copy: str) -> None:
    """Save what this layout holds after it has loaded the newest checkpoint of a run."""
    with precision_context(job):
        parts = build_components(job, group, Path(run))
        with closing(parts.engine.optimizer):
            steps = parts.state.restore_newest().completed_steps
            parts.engine.training_state(Path(copy), data_fingerprint=parts.data.fingerprint).save(steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("between")


@pytest.mark.proof
@pytest.mark.parametrize("case", [SMALL, *CASES], ids=_name)
def test_another_layout_has_the_same_bits_and_goes_on(ranks: Ranks, folder: Path, tmp_path: Path, case: Case) -> None:
    before, after, run = _layout(case, "before"), _layout(case, "after"), tmp_path / "run"
    job = _job(tmp_path, before, f"checkpoint.mode={case['mode']}", f"run.stop_at={STOPPED}")
    ranks.run_places(_ranks(before), run_job, job, run, timeout_s=240)
    shutil.rmtree(run / f"checkpoints/step-{STOPPED:08d}")
    job, copy = _job(tmp_path, after), tmp_path / "copy"
    copy.mkdir()
    ranks.run(_ranks(after), _restore_and_save, job, str(run), str(copy / "checkpoints"), timeout_s=240)
    assert same_bits(saved_tensors(copy), saved_tensors(run))
    ranks.run_places(_ranks(after), run_job, job, run, timeout_s=240)
    losses = {step.step: step.loss for step in read_steps(run / "events.jsonl")}  # The later of two with one number
    expected = _undisturbed_losses(ranks, folder)
    worst = max(abs(losses[step] - expected[step - 1]) / expected[step - 1] for step in range(SAVED + 1, LAST + 1))
    assert len(losses) == LAST and worst <= TOLERANCE, worst


def test_the_cases_cover_every_possible_pair() -> None:
    assert not uncovered_pairs(FACTORS, CASES)
    assert len(CASES) >= 16
