"""Every block of docs/guide/one-matmul.md, as it is written there: on two ranks, and under Triton's interpreter."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from environment import uncounted
from guide_blocks import GUIDES, blocks_of, run_script
from ranks import Ranks
from waiting import free_port

TEXT = (GUIDES / "one-matmul.md").read_text(encoding="utf-8")
BEFORE, KERNEL = TEXT.split("## The kernel\n")


def test_the_blocks_of_two_ranks_print_what_the_page_says(ranks: Ranks, tmp_path: Path) -> None:
    script, expected = blocks_of(BEFORE)
    assert ranks.run_places(2, run_script, tmp_path, script, free_port()) == [expected, ""]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: it has wheels for Linux on x86-64")
def test_the_kernels_print_what_the_page_says(tmp_path: Path) -> None:
    script, expected = blocks_of(KERNEL)
    (tmp_path / "kernel.py").write_text(script, encoding="utf-8")
    environment = {**uncounted(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "kernel.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout) == ("", expected)
