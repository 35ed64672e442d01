"""Parameters of stage 3 whose rows lie in files train to the bits of those on the device."""

from pathlib import Path

import pytest

from ranks import Ranks
from train.test_parameters_on_host import ALONE, CASES, NO_CLIPPING, check_resumed, check_same, job_of, ranks_of

DISK = [case for case in CASES if not any("moment_dtype" in word for word in case[1])]


@pytest.mark.parametrize(("layout", "settings", "model"), DISK)
def test_rows_on_disk_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], model: str
) -> None:
    places = "device/device", "disk/disk"
    jobs = [job_of(tmp_path, layout, place, "optimizer.clip_norm=0.05", *settings, model=model) for place in places]
    check_same(jobs, ranks, ranks_of(layout))


@pytest.mark.parametrize(("layout", "settings"), [*ALONE, ("microbatches=2", ["memory.window=1", "model.layers=3"])])
def test_shard_groups_of_one_rank_have_the_bits_of_stage_0(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str]
) -> None:
    others = " ".join(word for word in layout.split() if "shard_group" not in word)
    window = [word for word in settings if "window" in word]
    settings = [word for word in settings if word not in window]
    jobs = [
        job_of(tmp_path, f"{others} zero=0", "device/device", *settings, NO_CLIPPING),
        job_of(tmp_path, f"{layout} zero=3", "disk/disk", *settings, *window, NO_CLIPPING),
    ]
    check_same(jobs, ranks, ranks_of(layout), with_norms=False)


@pytest.mark.parametrize("pair", [("device/device", "disk/disk"), ("disk/disk", "host/host"), ("disk/host", "disk/disk")])
def test_a_run_goes_on_with_rows_in_another_place(ranks: Ranks, tmp_path: Path, pair: tuple[str, str]) -> None:
    check_resumed(ranks, tmp_path, pair)
