"""Places from the environments of the three launchers."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.parallel.process.launch_environment import (
    SINGLE_RANK,
    RankEnvironment,
    environment_variables_for,
    first_host,
    read_rank_environment,
    threads_for,
)
from refusals import refused


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


PLAIN = variables("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=host-a MASTER_PORT=29500")
TORCHRUN = PLAIN | variables("TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True")
SLURM = variables(
    "SLURM_JOB_ID=12345 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=1 SLURM_NODEID=2 "
    "SLURM_NODELIST=node[07-09] SLURM_TASKS_PER_NODE=2(x3)"
)
PORT = 15000 + 12345 * 31 % 15000


def test_no_launcher() -> None:
    assert read_rank_environment({"HOME": "/root", "MASTER_ADDR": "left over", "MASTER_PORT": "1"}) is None


@given(st.integers(1, 5000), st.data(), st.integers(0, 9))
def test_our_own_comes_back(world: int, data: st.DataObject, attempt: int) -> None:
    rank = data.draw(st.integers(0, world - 1))
    place = RankEnvironment(rank, world, rank, world, attempt, "file:///tmp/a folder/store")
    assert read_rank_environment({**TORCHRUN, **SLURM, **environment_variables_for(place)}) == place


def test_torchrun() -> None:
    place = RankEnvironment(5, 8, 1, 4, 2, "tcp://host-a:29500", store_exists=True)
    assert read_rank_environment({**SLURM, **TORCHRUN}) == place
    assert read_rank_environment({**PLAIN, "MASTER_ADDR": "::1"}) == RankEnvironment(5, 8, 1, 4, 0, "tcp://[::1]:29500")


@pytest.mark.parametrize("missing", PLAIN)
def test_half_of_torchrun_is_refused(missing: str) -> None:
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    refused(rf"^{missing} is not set, .*unset them and use `motet train --ranks N`$", read_rank_environment, half)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("RANK", "one", "RANK = 'one' is not a whole number"),
        ("RANK", "-1", "RANK = '-1' is not a whole number"),
        ("RANK", "8", "rank 8 of 8"),
        ("LOCAL_RANK", "4", "local rank 4 of 4"),
        ("LOCAL_WORLD_SIZE", "9", "local rank 1 of 9"),
        ("SLURM_NODELIST", "", "SLURM_NODELIST is not set"),
        ("SLURM_NODELIST", "node[1-", "is not a list of nodes"),
        ("SLURM_TASKS_PER_NODE", "two", "not of the form"),
        ("SLURM_NODEID", "3", "has 3 nodes"),
        ("SLURM_LOCALID", "2", "local rank 2 of 2"),
    ],
)
def test_impossible_places_are_refused(name: str, value: str, sentence: str) -> None:
    refused(sentence, read_rank_environment, {**(SLURM if name.startswith("SLURM") else TORCHRUN), name: value})


def test_slurm() -> None:
    place = read_rank_environment(SLURM)
    assert place == RankEnvironment(5, 6, 1, 2, 0, f"tcp://node07:{PORT}")
    again = read_rank_environment(SLURM | variables("SLURM_RESTART_COUNT=1 SLURM_CPUS_PER_TASK=12 SLURM_STEP_ID=1"))
    assert again is not None and (again.attempt, again.cores) == (1, 12) and again.rendezvous != place.rendezvous
    ours = read_rank_environment({**SLURM, "MASTER_ADDR": "boss", "MASTER_PORT": "777"})
    assert ours == replace(place, rendezvous="tcp://boss:777")


def test_a_step_counts_more_than_its_allocation() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_NODELIST": "b[1,4]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),8"}
    assert read_rank_environment({**SLURM, **step}) == RankEnvironment(5, 12, 1, 8, 0, f"tcp://b1:{PORT}")


@pytest.mark.parametrize(
    "shell",
    [
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # a batch script
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
    ],
)
def test_a_shell_of_slurm_is_no_rank(shell: dict[str, str]) -> None:
    assert read_rank_environment(shell) is None


def test_first_host() -> None:
    assert (first_host("alone"), first_host("a,b,c")) == ("alone", "a")
    assert (first_host("node[01-03,7]"), first_host("node[7,01-03],other")) == ("node01", "node7")
    assert first_host("rack[2-3]n[08-10].site,x") == "rack2n08.site"


@given(
    prefix=st.text(string.ascii_lowercase + "-", min_size=1, max_size=5).filter(lambda text: text[0] != "-"),
    ranges=st.lists(st.tuples(st.integers(0, 999), st.booleans(), st.integers(0, 99)), min_size=1, max_size=4),
    more=st.sampled_from(["", ",other", ",b[1-2]"]),
)
def test_first_host_of_any_list(prefix: str, ranges: list[tuple[int, bool, int]], more: str) -> None:
    inside = ",".join(f"{low:03d}-{low + wide:03d}" if several else f"{low:03d}" for low, several, wide in ranges)
    assert first_host(f"{prefix}[{inside}]{more}") == f"{prefix}{ranges[0][0]:03d}"


@given(st.text(max_size=30))
def test_any_text_is_a_host_or_a_sentence(text: str) -> None:
    try:
        host = first_host(text)
    except InputError:
        return
    assert host and "[" not in host


def test_threads_are_set_given_or_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.parallel.process.launch_environment.usable_cores", lambda: 7)
    assert [threads_for(replace(SINGLE_RANK, local_world=count), None) for count in (1, 2, 9)] == [7, 3, 1]
    assert [threads_for(replace(SINGLE_RANK, local_world=2, cores=5), setting) for setting in (None, 2)] == [5, 2]
