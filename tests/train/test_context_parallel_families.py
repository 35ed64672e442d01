"""The page of context parallelism on families of models: they train as on one device, or are refused with a reason."""

from pathlib import Path

import pytest
from pages.context_parallel_families import (
    FAMILIES,
    LAYOUTS,
    LIMIT,
    describe_attention,
    job_of,
    read_rows,
    trained_rows,
)

from motet.core.errors import InputError

QUICK = ["xglm"]  # It drops its mask where a registered function computes its attention
FEWEST = 40
REFUSED = {"bloom", "xglm", "mpt", "gptj", "llama4_text", "minimax", "jamba", "qwen3_next", "recurrent_gemma"}


def test_families_train_as_on_one_device_or_are_refused() -> None:
    rows, trained = read_rows(), trained_rows()
    assert [row["family"] for row in rows] == list(FAMILIES) and len(trained) >= FEWEST
    assert {row["family"] for row in rows if row["refusal"]} >= REFUSED
    assert all(float(row[layout]) < LIMIT for row in trained for layout in LAYOUTS)
    assert sum("window" in row["attention"] for row in trained) >= 13


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.proof) for f in FAMILIES])
def test_a_proof_says_what_the_page_says(tmp_path: Path, family: str) -> None:
    (row,) = (row for row in read_rows() if row["family"] == family)
    try:
        result = {"attention": describe_attention(job_of(family, tmp_path, LAYOUTS[0])), "refusal": ""}
    except InputError as error:
        result = {"attention": "", "refusal": str(error)}
    assert result == {name: row[name] for name in result}
