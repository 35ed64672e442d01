"""Numbers as people type them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from motet.cli.collectives.proof_report import parse_options, read_program
from motet.cli.job_arguments import parse_bytes, parse_rank_counts, parse_size_range
from motet.collectives import build
from refusals import refused


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096), ("4KiB", 4096), ("64MiB", 64 * 2**20), ("1e6", 10**6), ("1.5 GB", 1_500_000_000),
        ("2gib", 2**31), ("12b", 12), (".5KiB", 512), ("1KB", 1000),
    ],
)  # fmt: skip
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "4 parsecs", "-1", "1e99", "0.1", "nan", "1e6.5"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    refused("size", parse_bytes, text)


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (parse_size_range, "1KiB..16KiB", [1024, 4096, 16384]), (parse_size_range, "1KiB..9KiB", [1024, 4096, 9216]),
        (parse_size_range, "4KiB,1KiB", [1024, 4096]), (parse_size_range, "7", [7]),
        (parse_rank_counts, "2..5", [2, 3, 4, 5]), (parse_rank_counts, "8,4,2..3", [2, 3, 4, 8]),
        (parse_rank_counts, "7", [7]),
    ],
)  # fmt: skip
def test_sizes_and_counts(parse: Callable[[str], list[int]], text: str, found: list[int]) -> None:
    assert parse(text) == found


def test_options() -> None:
    assert parse_options(["pieces=4", "dims=2x3"]) == {"pieces": 4, "dims": (2, 3)}
    refused("not of the form NAME=VALUE", parse_options, ["=4"])


def test_a_file_that_holds_a_program(tmp_path: Path) -> None:
    ring = build("all-reduce", "ring", 2)
    (tmp_path / "whole.json").write_text(ring.to_json())
    assert read_program(str(tmp_path / "whole.json")) == ring
