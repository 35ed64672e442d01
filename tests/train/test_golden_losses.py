"""The losses of small jobs on a text of our own, kept as text: whatever changes them, from shuffling to the optimizer's
arithmetic, is seen. In float64, so that machines differ by less than what is compared."""

import csv
from pathlib import Path

import pytest

from ranks import Ranks
from train.runs import small_job, train

GOLDEN = Path(__file__).parent / "data" / "golden_losses.csv"
"""`pytest tests/train/test_golden_losses.py --regenerate -n 0` writes it anew."""


def _golden() -> dict[str, list[float]]:
    with GOLDEN.open(encoding="utf-8") as file:
        return {model: list(map(float, losses)) for model, *losses in csv.reader(file)}


@pytest.mark.parametrize("model", ["decoder", "bert", "t5"])
def test_losses_are_those_that_are_kept(ranks: Ranks, tmp_path: Path, model: str, regenerate: bool) -> None:
    losses = ranks.run(2, train, small_job(tmp_path, "layout.zero=1", model=model))[0].losses
    if regenerate:
        kept = {**(_golden() if GOLDEN.exists() else {}), model: losses}
        lines = [",".join([name, *(f"{loss:.12g}" for loss in kept[name])]) for name in sorted(kept)]
        GOLDEN.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert losses == pytest.approx(_golden()[model], rel=1e-9, abs=0)
