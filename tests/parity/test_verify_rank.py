"""The ranks of a verification do one layout after another."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from motet.core.text_files import to_toml
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parity import rank_main
from motet.parity.rank_main import record_layouts_on_rank
from motet.parity.record.record_verification_steps import RecordFolder
from motet.train.job import load_job
from motet.train.launch.failures import StopFlag
from motet.train.launch.run_folder import JOB_FILE


@pytest.fixture
def record_on_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Go through layouts on rank 1 without groups: where the ranks of each meet, and the split that it knows."""

    def record(*layouts: str) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def start_group(place: RankEnvironment, *how: Any, cpu_backend: str) -> Any:
            return nullcontext(place)

        def record_layout(candidate: Any, group: RankEnvironment, *_: Any, model_sharding: Any) -> ModelSharding:
            calls.append({"world": group.world, "file": group.rendezvous, "known": model_sharding})
            return ModelSharding()

        monkeypatch.setattr(rank_main, "start_process_group", start_group)
        monkeypatch.setattr(rank_main, "_record_layout", record_layout)
        monkeypatch.setattr(rank_main.torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(StopFlag, "exit_on_sigterm", lambda flag: None)
        (tmp_path / JOB_FILE).write_text(to_toml(load_job("tiny").model_dump(exclude_none=True, exclude_unset=True)))
        for number in range(len(layouts)):
            RecordFolder(tmp_path, number, 1).mark_done(0)
        place = RankEnvironment(1, 4, 1, 4, 0, f"file://{tmp_path}/store")
        assert record_layouts_on_rank(place, StopFlag(), str(tmp_path), *layouts) == 0
        return calls

    return record


def test_groups_of_other_sizes_meet_in_other_files(record_on_rank: Callable[..., list[dict[str, Any]]]) -> None:
    """The one that is left last removes the file, which may be when others have opened it again."""
    calls = record_on_rank("dp=2", "dp=2 zero=1", "dp=3", "dp=4")
    assert [call["world"] for call in calls] == [2, 2, 3, 4] and len({call["file"] for call in calls}) == 3


def test_a_split_is_known_where_all_ranks_have_looked_for_it(
    record_on_rank: Callable[..., list[dict[str, Any]]],
) -> None:
    """Ranks 2 and 3 did not take part in the first layouts: they would wait for the split that the others know."""
    calls = record_on_rank("tp=2", "tp=2 microbatches=2", "tp=2 sp=true", "tp=2 dp=2 zero=2", "tp=2 dp=2 zero=3")
    assert [call["known"] is not None for call in calls] == [False, True, False, False, True]
    calls = record_on_rank("dp=2", "cp=2", "cp=2 cp_order=contiguous", "tp=2 dp=2", "tp=2 cp=2")
    assert [call["known"] is not None for call in calls[-5:]] == [False, False, True, False, False]
