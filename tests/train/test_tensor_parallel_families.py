"""The page of tensor parallelism on families of models says what ranks split, and that they train as one device."""

from pathlib import Path

import pytest
from pages.tensor_parallel_families import FAMILIES, LAYOUTS, LIMIT, describe, job_of, read_rows

from ranks import Ranks
from train.tensor_parallel_runs import roles_on_rank

QUICK = ["bloom"]  # Its attention stays whole
FEWEST = 14


def test_every_family_trains_as_on_one_device() -> None:
    rows = read_rows()
    assert [row["family"] for row in rows] == list(FAMILIES) and len(rows) >= FEWEST
    assert all(float(row[layout]) < LIMIT for row in rows for layout in LAYOUTS)


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.proof) for f in FAMILIES])
def test_ranks_split_what_the_page_says(ranks: Ranks, tmp_path: Path, family: str) -> None:
    found = describe(ranks.run(2, roles_on_rank, job_of(family, tmp_path, LAYOUTS[0]))[0])
    (row,) = (row for row in read_rows() if row["family"] == family)
    assert found == {column: row[column] for column in found}
