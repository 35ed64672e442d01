"""Parameters of stage 3 whose rows lie in files train to the bits of those on the device, with a window on the host."""

import errno
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from motet.core.errors import InputError, StateFileError
from motet.memory.tiers.file_tensors import FileTensors
from motet.memory.tiers.optimizer_states import FetchedUnit, FileStates
from motet.memory.tiers.row_window import RowWindow
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.launch.preflight import check_job
from motet.train.memory_check.step_prediction import bytes_elsewhere
from ranks import Ranks
from train.test_optimizer_tiers import memory_cgroup, world_of
from train.test_parameters_on_host import (
    ALONE,
    CASES,
    NO_CLIPPING,
    check_rehearsal,
    check_resumed,
    check_same,
    job_of,
)

__all__ = ["memory_cgroup"]

DISK = [case for case in CASES if not any("moment_dtype" in word for word in case[1])]


@pytest.mark.parametrize(
    ("layout", "settings", "model"),
    [pytest.param(*case, marks=() if index == 1 else pytest.mark.proof) for index, case in enumerate(DISK)],
)
def test_rows_on_disk_have_the_bits_of_the_device(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], model: str
) -> None:
    places = "device/device", "disk/disk"
    jobs = [job_of(tmp_path, layout, place, "optimizer.clip_norm=0.05", *settings, model=model) for place in places]
    check_same(jobs, ranks, world_of(layout))


@pytest.mark.parametrize(
    ("layout", "settings", "window"),
    [
        ("microbatches=2", ["precision.recipe=bf16", "model.layers=5"], 1),
        *[pytest.param(*case, 2, marks=pytest.mark.proof) for case in ALONE],
    ],
)
def test_shard_groups_of_one_rank_have_the_bits_of_stage_0(
    ranks: Ranks, tmp_path: Path, layout: str, settings: list[str], window: int
) -> None:
    others = " ".join(word for word in layout.split() if "shard_group" not in word)
    jobs = [
        job_of(tmp_path, f"{others} zero=0", "device/device", *settings, NO_CLIPPING),
        job_of(tmp_path, f"{layout} zero=3", "disk/disk", *settings, f"memory.window={window}", NO_CLIPPING),
    ]
    check_same(jobs, ranks, world_of(layout), with_norms=False)


@pytest.mark.parametrize(
    "pair",
    [
        ("device/device", "disk/disk"),
        pytest.param(("disk/disk", "host/host"), marks=pytest.mark.proof),
        pytest.param(("disk/host", "disk/disk"), marks=pytest.mark.proof),
    ],
)
def test_a_run_goes_on_with_rows_in_another_place(ranks: Ranks, tmp_path: Path, pair: tuple[str, str]) -> None:
    check_resumed(ranks, tmp_path, pair)


def predictions_of_steps(group: RankGroup, job: Job) -> list[list[int]]:
    """The units at whose gathers a rank has not read them ahead, by step."""
    steps, predict = list[list[int]](), RowWindow._predict_from

    def noted(window: RowWindow, unit: int) -> None:
        steps[-1].append(unit)
        predict(window, unit)

    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        step = parts.make_train_step(job)
        with patch.object(RowWindow, "_predict_from", noted):
            for index in range(2):
                steps.append([])
                step.step(index, 0.01)
    return steps


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_knows_all_its_reads_when_its_first_forward_begins(ranks: Ranks, tmp_path: Path, recompute: str) -> None:
    job = job_of(tmp_path, "zero=3 microbatches=3", "disk/disk", f"memory.recompute={recompute}")
    assert ranks.run(2, predictions_of_steps, job, timeout_s=120) == [[[0], [0]]] * 2


def test_rows_that_were_read_ahead_of_an_update_are_read_again(tmp_path: Path) -> None:
    states = FileStates(torch.device("cpu"), torch.float32, folder=tmp_path, moments=[], rows_ahead=1)
    rows, masters = states.allocate_rows([4, 4], [4, 4])
    units = [FetchedUnit([each], reads_again=False) for each in rows]
    (fetch,), (fetch_next,) = states.fetches(units, turns=True)
    fetch()
    with states.updating([]):
        states.update(1, lambda elements, tensors: tensors["master"].add_(1), ())
    assert masters is None and fetch_next().tolist() == [1.0] * 4
    states.close()


def errors_of_reads(group: RankGroup, job: Job) -> list[tuple[str, int]]:
    """(The error, its exit code) of steps in which the disk fails one read: the first, one in the middle, the last."""
    start_read, started, failing = FileTensors.start_read, 0, -1

    def start(files: FileTensors, *args: Any) -> list[Future[None]]:
        nonlocal started
        futures, started = start_read(files, *args), started + 1
        if started == failing:
            futures.append(Future())
            futures[-1].set_exception(OSError(errno.EIO, "Input/output error", "master.bin"))
        return futures

    def run() -> str | tuple[str, int]:
        nonlocal started
        with precision_context(job), tempfile.TemporaryDirectory() as folder:
            parts = build_components(job, group, Path(folder))
            step, started = parts.make_train_step(job), 0
            try:
                step.step(0, 0.01)
            except StateFileError as error:
                return str(error), error.exit_code
            finally:
                parts.engine.optimizer.close()
        return ""

    with patch.object(FileTensors, "start_read", start):
        assert run() == ""
        total, errors = started, []
        for number in (1, total // 2 + 1, total):
            failing = number
            errors.append(run())
    return errors


def test_an_error_of_the_disk_ends_forward_and_backward(ranks: Ranks, tmp_path: Path) -> None:
    job = job_of(tmp_path, "zero=3", "disk/disk")
    text = "could not read master.bin (Input/output error): the last checkpoint is complete; check the disk, or set"
    for error, code in ranks.run(1, errors_of_reads, job)[0]:
        assert error.startswith(text) and code == 5


@pytest.mark.parametrize("layout", ["zero=3", "dp=2 zero=3 microbatches=2"])
def test_a_rehearsal_has_the_predicted_peak(tmp_path: Path, layout: str) -> None:
    check_rehearsal(tmp_path, layout, "disk/disk")


def bytes_of_files(group: RankGroup, job: Job) -> tuple[int, int]:
    """The bytes of the files of a rank, and the predicted ones."""
    assert job.memory.folder is not None
    with precision_context(job), tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, group, Path(folder))
        files = sum(file.stat().st_size for file in Path(job.memory.folder).glob("motet-state-*/*/*.bin"))
        plan, recipe = parts.engine.plan, job.precision.resolved
        predicted = bytes_elsewhere(plan, recipe, job.optimizer, rank=group.rank)["disk"]
        parts.engine.optimizer.close()
    return files, predicted


@pytest.mark.parametrize("model", ["decoder", "adapters"])
def test_the_disk_has_one_copy_of_the_parameters(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """Adapters have files of frozen rows, too."""
    (rows, planned), (copies, states) = (
        ranks.run(1, bytes_of_files, job_of(tmp_path, "zero=3", f"disk/{place}", model=model))[0]
        for place in ("disk", "host")
    )
    assert (rows, copies) == (planned, states) and (rows > copies) == (model == "adapters")


def test_parameters_on_disk_need_states_there(tmp_path: Path) -> None:
    words, folder = ["layout.zero=3", "memory.parameters=disk"], f"memory.folder={tmp_path}"
    for more in ([], ["memory.optimizer=host"], ["memory.tiers=auto", folder]):
        with pytest.raises(
            InputError, match=r"parameters = 'disk' needs memory.optimizer = 'disk', since the rows are"
        ):
            load_job("tiny", [*words, *more])
    with pytest.raises(InputError, match=r"and memory.parameters = 'disk' lets it compute with them; leave one"):
        check_job(load_job("tiny", [*words, "memory.optimizer=disk", folder, "memory.update=delayed"]), 1)
    with pytest.raises(InputError, match=r"memory.window = 3 has no effect with memory.parameters = 'host'"):
        load_job("tiny", ["layout.zero=3", "memory.parameters=host", "memory.optimizer=host", "memory.window=3"])


def test_a_layout_shows_reads_of_rows(tmp_path: Path, motet: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    words = ["memory.optimizer=disk", f"memory.folder={tmp_path}", "memory.parameters=disk"]
    shown = motet("show", "layout", "dp=2 zero=3", "--job", "tiny", *words)
    assert "which reads 35.8 MiB and writes 22.7 MiB of files" in shown.stdout


@pytest.mark.proof
def test_rows_in_files_fit_where_the_host_is_too_small(tmp_path: Path, memory_cgroup: Path) -> None:
    """A process limit that holds a window of the rows, and not all of them."""
    (memory_cgroup / "memory.limit_in_bytes").write_text(f"{1400 << 20}")
    enter = f'echo $$ > {memory_cgroup}/cgroup.procs; exec "$@"'

    def train(parameters: str) -> subprocess.CompletedProcess[str]:
        words = ["model.layers=16", "model.vocab_size=4096", "data.batch_sequences=1", "run.steps=2", "run.threads=1"]
        words += ["layout.zero=3", "memory.optimizer=disk", f"memory.folder={tmp_path}", "monitor.tensorboard=false"]
        words += [f"memory.parameters={parameters}", f"run.folder={tmp_path / parameters}"]
        command = ["bash", "-c", enter, "bash", sys.executable, "-m", "motet", "train", "offload-demo", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    on_host, on_disk = train("host"), train("disk")
    assert on_host.returncode == 3 and "SIGKILL" in on_host.stderr, on_host.stderr[-500:]
    assert on_disk.returncode == 0, on_disk.stderr[-500:]
