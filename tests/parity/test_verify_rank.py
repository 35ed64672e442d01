"""The ranks of a verification do one layout after another."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from motet.core.toml_writer import to_toml
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parity import rank_main
from motet.parity.rank_main import record_layouts_on_rank
from motet.parity.record.record_verification_steps import RecordFolder
from motet.train.job import load_job
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import JOB_FILE


def test_groups_of_other_sizes_meet_in_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is left last removes the file, which may be when others have opened it again."""
    met: list[tuple[int, str]] = []

    def start_group(place: RankEnvironment, *how: Any, cpu_backend: str) -> Any:
        met.append((place.world, place.rendezvous))
        return nullcontext()

    monkeypatch.setattr(rank_main, "start_process_group", start_group)
    monkeypatch.setattr(rank_main, "_record_layout", lambda *given, **options: None)
    monkeypatch.setattr(rank_main.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(StopFlag, "exit_on_sigterm", lambda flag: None)
    (tmp_path / JOB_FILE).write_text(to_toml(load_job("tiny").model_dump(exclude_none=True, exclude_unset=True)))
    for number in range(3):
        RecordFolder(tmp_path, number, 1).mark_done(0)
    place = RankEnvironment(1, 4, 1, 4, 0, f"file://{tmp_path}/store")
    assert record_layouts_on_rank(place, StopFlag(), str(tmp_path), "dp=2", "dp=2 zero=1", "dp=3", "dp=4") == 0
    assert [world for world, _ in met] == [2, 3, 4] and len({file for _, file in met}) == 3
