"""The page of mixtures on families of models says what a run without memory says, and that all train as one device."""

from pathlib import Path

import pytest
from pages.mixture_families import LAYOUTS, describe_balance, is_right, read_rows, trained_rows

from train.mixture_runs import CORRECTIONS, FAMILIES, MORE_FAMILIES

QUICK = {"phimoe", "glm4_moe"}  # One whose routers draw random numbers, and one with a correction
REFUSED = {"phimoe", "jetmoe", "llama4_text", "longcat_flash"}


def test_families_train_as_on_one_device_or_are_refused() -> None:
    rows, trained = read_rows(), trained_rows()
    assert [row["family"] for row in rows] == [*FAMILIES, *MORE_FAMILIES]
    assert {row["family"] for row in rows if row["refusal"]} == REFUSED
    assert all(is_right(row) for row in trained) and all(row[layout] for row in trained for layout in LAYOUTS)
    assert {row["family"] for row in trained if row["correction"]} >= CORRECTIONS.keys() & FAMILIES.keys()


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.proof) for f in (*FAMILIES, *MORE_FAMILIES)]
)
def test_a_run_without_memory_says_what_the_page_says(tmp_path: Path, family: str) -> None:
    (row,) = (row for row in read_rows() if row["family"] == family)
    assert describe_balance(tmp_path, family) == {name: row[name] for name in ("correction", "refusal")}
