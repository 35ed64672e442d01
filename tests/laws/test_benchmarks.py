"""Every benchmark can be imported, builds its arguments and contenders, and runs with `--quick`."""

import subprocess
import sys
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from motet.parallel.process.process_group import RankGroup
from ranks import Ranks

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # Of the processes of ranks, too
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
NOT_QUICK = {
    "collective_curves": "it reads a file of published times that is not in the repository",
    "mutations": "it runs the tests",
}


@pytest.mark.parametrize("name", NAMES)
def test_it_builds_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    spec = spec_from_file_location(f"benchmark_{name}", ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as done:
        module.main()
    assert done.value.code == 0 and ("--quick" in capsys.readouterr().out) == (name not in NOT_QUICK)


def contenders_of_a_rank(group: RankGroup) -> int:
    import data_parallel
    import train_step
    from parts.contenders import MAKERS

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", "--quick", "--stages", "0", "--only", "motet"])
    contenders = [each for each in data_parallel.contenders(data_parallel.parse()) if each.backend == "gloo"]
    for each in contenders:
        assert group.process_group is not None
        MAKERS[each.who](each, "fp32", group.process_group)
    train_step.motet_runner("tiny", "fp32")
    return len(contenders)


def test_it_builds_its_contenders(ranks: Ranks) -> None:
    assert ranks.run(2, contenders_of_a_rank) == [1, 1]


@pytest.mark.parametrize("root", [0, 1])
def test_a_step_without_communication_is_finite(root: int) -> None:
    """Parameters are received into memory that holds anything; the root keeps its own."""
    from parts.null_backend import NullProcessGroup

    options, received = dist.BroadcastOptions(), torch.full((3,), torch.nan)
    options.rootRank = root
    NullProcessGroup(dist.HashStore(), 1, 2, timedelta(seconds=1)).broadcast([received], options)
    assert received.isfinite().all() == (root == 0)


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_QUICK])
def test_it_runs_quickly(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
