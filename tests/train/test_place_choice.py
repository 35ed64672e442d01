"""`memory.tiers = "auto"`: the first place of masters and moments in which a step is predicted to fit."""

from pathlib import Path

import pytest

import motet
from motet.core.errors import InputError
from motet.train.job import Job, load_job
from motet.train.launch.place_choice import choose_places
from motet.train.launch.preflight import check_job
from motet.train.launch.run_folder import read_stored_job
from motet.train.memory_check.predicted_ranks import predict_step_memory
from refusals import refused
from train.runs import small_job


def job_of(folder: Path, *settings: str) -> Job:
    sizes = "model.hidden=64", "model.layers=2", "precision.recipe=bf16"
    return small_job(folder, *sizes, "data.batch_sequences=4", "run.steps=1", *settings)


def peak(job: Job) -> int:
    return max(rank.predicted.peak for rank in predict_step_memory(job, job.layout_for(job.run.ranks)))


def chosen(job: Job) -> tuple[Job, str]:
    lines = list[str]()
    job = choose_places(job, lines.append)
    return job, "\n".join(lines)


@pytest.mark.parametrize("settings", [(), ("run.ranks=2", "layout.zero=1"), ("run.ranks=2", "layout.zero=3")])
def test_the_first_place_that_fits_is_chosen(tmp_path: Path, settings: tuple[str, ...]) -> None:
    on_device, on_host = (
        peak(job_of(tmp_path, *settings, f"memory.optimizer={place}")) for place in ("device", "host")
    )
    assert on_host < on_device
    auto = "memory.tiers=auto", *settings
    job, text = chosen(job_of(tmp_path, *auto, f"memory.device_limit={on_device}"))
    assert (job.memory.optimizer, job.memory.tiers) == ("device", "explicit")
    assert text == "memory.tiers = 'auto' chooses memory.optimizer=device: a step fits on the devices"
    for limit in (on_device - 1, on_host):
        job, text = chosen(job_of(tmp_path, *auto, f"memory.device_limit={limit}", f"memory.folder={tmp_path}"))
        assert (job.memory.optimizer, job.memory.folder) == ("host", None)
        assert f"chooses memory.optimizer=host: with device, memory.device_limit = {limit} " in text
    message = r"finds no place for masters and moments: with device, .*; with host, .*; with disk, memory.folder is not"
    refused(message, chosen, job_of(tmp_path, *auto, f"memory.device_limit={on_host - 1}"))


def test_a_host_that_is_full_needs_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU ranks without a limit have their tensors in the memory of the machine."""
    from motet.cluster.host_limits import MemoryLimit
    from motet.train.launch import preflight

    job = job_of(tmp_path, "memory.tiers=auto", f"memory.folder={tmp_path}")
    assert chosen(job)[0].memory.optimizer == "device"
    states = peak(job_of(tmp_path)) - peak(job_of(tmp_path, "memory.optimizer=host"))
    assert states > 12 * 64 * 260  # Masters and moments of the table alone
    full = MemoryLimit("this machine has", states, is_shared=True, process_bytes=0)
    monkeypatch.setattr(preflight, "read_memory_limits", lambda: [full])
    job, text = chosen(job)
    assert (job.memory.optimizer, job.memory.folder) == ("disk", str(tmp_path))
    assert "with device, " in text and "with host, " in text


def test_a_delayed_update_is_none_of_the_device(tmp_path: Path) -> None:
    job, text = chosen(job_of(tmp_path, "memory.tiers=auto", "memory.update=delayed"))
    assert (job.memory.optimizer, job.memory.update) == ("host", "delayed")
    assert text.endswith("memory.optimizer=host: with device, memory.update = 'delayed' has no effect")


def test_a_cluster_may_serve_the_choice_alone() -> None:
    """A cluster without a use on the devices is left out of the job."""
    words = ["memory.tiers=auto", "communication.cluster=h100", "memory.device_limit={limit}"]
    for limit, place, cluster in (("2GiB", "device", None), ("400MiB", "host", "h100")):
        job = choose_places(load_job("offload-demo", [word.format(limit=limit) for word in words]), lambda line: None)
        assert (job.memory.optimizer, job.communication.cluster) == (place, cluster)


def test_a_run_stores_the_choice(tmp_path: Path) -> None:
    """The stored job names the place, so that a resumed run keeps it."""
    limit = peak(job_of(tmp_path)) - 1
    job = job_of(tmp_path, "memory.tiers=auto", f"memory.device_limit={limit}", f"run.folder={tmp_path / 'run'}")
    folder, progress = motet.run(job)
    stored = read_stored_job(folder)
    assert progress.is_finished and (stored.memory.optimizer, stored.memory.tiers) == ("host", "explicit")


def test_what_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tiers = 'auto' chooses memory.optimizer, which is 'host' already"):
        job_of(tmp_path, "memory.tiers=auto", "memory.optimizer=host")
    with pytest.raises(InputError, match=r"memory.folder = .* has no effect with memory.optimizer = 'device'"):
        job_of(tmp_path, f"memory.folder={tmp_path}")
    auto = job_of(tmp_path, "memory.tiers=auto")
    refused("memory.tiers = 'auto' is chosen where `motet train` starts the ranks", check_job, auto, 1)
    job, _ = chosen(auto)
    check_job(job, 1)
    hidden = small_job(tmp_path, "memory.tiers=auto", model="llama").model_copy()
    refused(
        "does not know the memory of this device or the sizes of this model; set memory.device_limit", chosen, hidden
    )
    mistaken = job_of(tmp_path, "memory.tiers=auto", "data.objective=masked")
    refused("data.objective = 'masked' does not fit a model", chosen, mistaken)
