"""Parameters of stage 3 whose rows lie in files train to the bits of those on the device."""

from pathlib import Path

import pytest

from ranks import Ranks
from train.test_parameters_on_host import CASES, check_same, job_of, ranks_of

DISK = [case for case in CASES if not any("moment_dtype" in word for word in case[1])]


@pytest.mark.parametrize(("layout", "settings", "model"), DISK)
def test_rows_on_disk_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], model: str
) -> None:
    places = "device/device", "disk/disk"
    jobs = [job_of(tmp_path, layout, place, "optimizer.clip_norm=0.05", *settings, model=model) for place in places]
    check_same(jobs, ranks, ranks_of(layout))
