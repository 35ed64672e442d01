"""Steps whose masters and moments lie on the host or on disk: bytes by place, the timeline of an update, rankings."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from motet.cli.main import app
from motet.cluster.cluster import cluster_presets
from motet.cluster.cluster_settings import BytesPerSecondSetting, HostSettings
from motet.core.errors import InputError
from motet.memory.policy_choice import Place
from motet.models.settings import DecoderSettings
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.plan.memory.step_memory import estimate_memory, host_problem
from motet.plan.planned_cluster import PlannedCluster, load_planned_cluster
from motet.plan.planned_step import PlannedStep
from motet.plan.time.host_update import HostRates, PartSeconds, simulate_host_update, simulate_sends, simulate_update
from motet.plan.time.step_events import StepEvent, StepStream
from motet.train.forecast.planned_job import planned_step
from motet.train.memory_check.predicted_ranks import predict_step_memory
from plan.sized_layouts import sized, sized_layout
from refusals import refused
from train.runs import small_job

MODEL = DecoderSettings(
    vocab_size=32000, context=2048, layers=8, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, tied=False
)
COUNT = PlannedStep(MODEL, 2048, 256, sized_layout(dp=1)).spec.parameter_count
H100 = load_planned_cluster("h100", 8)
MIB = 2**20


def step_of(states: Place = "host", *, overlap: str = "backward", **sizes: Any) -> PlannedStep:
    communication = CommunicationSettings.model_validate({"overlap": overlap})
    return PlannedStep(MODEL, 2048, 256, **sized(**sizes), states=states, communication=communication)


# --- bytes by place -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "device", "updated"),
    # bf16 with AdamW: the device keeps 2 bytes of values and 4 of gradients; stage 3 has its rows in float32
    [(0, 6.0, 1.0), (1, 6.0, 1 / 8), (2, 2 + 4 / 8, 1 / 8), (3, 4 / 8, 1 / 8)],
)
def test_the_host_has_masters_moments_and_sums(zero: int, device: float, updated: float) -> None:
    memory = estimate_memory(step_of(dp=8, zero=zero, microbatches=2))
    worst = memory.worst.bytes
    kept = sum(worst.get(name, 0.0) for name in ("parameters", "master parameters", "moments"))
    gradients = worst.get("gradients", 0.0) if zero < 3 else 0.0  # Rows have gradients only in backward
    assert kept + gradients == pytest.approx(device * COUNT)
    expected = {"master parameters": 4 * COUNT, "moments": 8 * COUNT, "gradients that were sent": 4 * COUNT}
    on_host = memory.on_fullest_host("host", 8)
    assert on_host == pytest.approx({name: 8 * updated * size for name, size in expected.items()})
    assert memory.on_fullest_host("disk", 8) == {}
    half = memory.on_fullest_host("host", 4)  # Four of the eight ranks
    assert half == pytest.approx({name: size / 2 for name, size in on_host.items()})


def test_files_leave_sums_and_buffers_on_the_host() -> None:
    memory = estimate_memory(step_of("disk", dp=8, zero=1))
    buffers = 8 * 4 * 3 * 4 * MIB  # Ranks, pieces of a master and two moments, bytes of a piece
    assert memory.on_fullest_host("host", 8) == {"gradients that were sent": 4 * COUNT, "buffers of files": buffers}
    assert memory.on_fullest_host("disk", 8) == {"master parameters": 4 * COUNT, "moments": 8 * COUNT}
    assert memory.worst.bytes == estimate_memory(step_of("host", dp=8, zero=1)).worst.bytes


def test_stages_of_a_pipeline_share_a_host() -> None:
    """All eight stages on one host have the parameters once; on hosts of two, the fullest pair counts."""
    step = step_of(pp=8, microbatches=8, schedule="1f1b")
    memory = estimate_memory(step)
    assert memory.on_fullest_host("host", 8)["master parameters"] == pytest.approx(4 * COUNT)
    blocks = [stage.blocks for stage in step.stage_specs]
    stages = [sum(block.parameter_count * block.repeat for block in each) for each in blocks]
    pairs = [4 * (a + b) for a, b in zip(stages[::2], stages[1::2], strict=True)]
    assert max(pairs) > min(pairs)
    assert memory.on_fullest_host("host", 2)["master parameters"] == pytest.approx(max(pairs))


def test_a_full_host_is_named() -> None:
    memory = estimate_memory(step_of(dp=8, zero=1))
    needed = 16 * COUNT
    assert host_problem(memory, needed / 0.9 + 1, 8, shares_with_devices=False) == (None, 0.0)
    reason, missing = host_problem(memory, needed, 8, shares_with_devices=False)
    assert missing == pytest.approx(0.1 * needed)
    assert reason is not None and reason.startswith("the 8 ranks of a host: ") and " of its memory > " in reason
    # Processors have the tensors of their devices in the same memory.
    _, more = host_problem(memory, needed, 8, shares_with_devices=True)
    assert more == pytest.approx(missing + 8 * memory.worst.outside)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_bytes_of_a_plan_are_those_of_a_run(zero: int, place: str, tmp_path: Path) -> None:
    """A run predicts its places from its buckets, with padding of at most 4,096 bytes for a slice."""
    files = [f"memory.folder={tmp_path}"] if place == "disk" else []
    sizes = "model.hidden=256", "model.layers=2", "precision.recipe=bf16", "data.batch_sequences=8"
    job = small_job(tmp_path, *sizes, f"layout.zero={zero}", f"memory.optimizer={place}", *files)
    layout = job.layout_for(2)
    memory = estimate_memory(planned_step(job, sized_layout(dp=2, zero=zero)))
    run = predict_step_memory(job, layout)
    places: tuple[Place, ...] = ("host", "disk")
    for where in places:
        planned = sum(memory.on_fullest_host(where, 2).values())
        predicted = sum(rank.elsewhere[where] for rank in run)
        if place == "disk" and where == "host":  # The slices of this model are smaller than the pieces of a buffer
            assert predicted <= planned
        else:
            assert planned == pytest.approx(predicted, rel=0.05, abs=1)
    shares = [rank.predicted.peak_of("parameters", "master parameters", "moments") for rank in run]
    states = sum(memory.worst.bytes.get(name, 0.0) for name in ("parameters", "master parameters", "moments"))
    assert states == pytest.approx(max(shares), rel=0.02)


# --- the timeline of an update -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "first", "second"),
    # Spans of (read, update, write, receive, gather) of two equal parts, by hand
    [
        # The cores: the second update waits for the first
        (
            PartSeconds(update=5, receive=1, gather=1),
            ((0, 0), (0, 5), (5, 5), (5, 6), (6, 7)),
            ((0, 0), (5, 10), (10, 10), (10, 11), (11, 12)),
        ),
        # The link: the second part is sent when the first has arrived
        (
            PartSeconds(update=1, receive=5, gather=1),
            ((0, 0), (0, 1), (1, 1), (1, 6), (6, 7)),
            ((0, 0), (1, 2), (2, 2), (6, 11), (11, 12)),
        ),
        # The network
        (
            PartSeconds(update=1, receive=1, gather=4),
            ((0, 0), (0, 1), (1, 1), (1, 2), (2, 6)),
            ((0, 0), (1, 2), (2, 2), (2, 3), (6, 10)),
        ),
        # The disk: it reads the second part before it writes the first
        (
            PartSeconds(read=3, update=1, write=4, receive=1),
            ((0, 3), (3, 4), (6, 10), (10, 11), (11, 11)),
            ((3, 6), (6, 7), (10, 14), (14, 15), (15, 15)),
        ),
    ],
)
def test_two_parts_wait_for_the_slowest_resource(part: PartSeconds, first: Any, second: Any) -> None:
    assert [tuple(map(tuple, spans)) for spans in simulate_update([part, part])] == [first, second]


def test_a_disk_reads_one_part_ahead() -> None:
    spans = simulate_update([PartSeconds(read=1, update=1, write=1)] * 3)
    assert [each.read for each in spans] == [(0, 1), (1, 2), (3, 4)]
    assert [each.write for each in spans] == [(2, 3), (4, 5), (5, 6)]


def test_sums_travel_one_after_the_other() -> None:
    parts = [PartSeconds(send=2), PartSeconds(send=3)]
    assert simulate_sends(parts, [1, 2]) == [(1, 3), (3, 6)]  # The second is ready before the link is free
    assert simulate_sends(parts, [1, 9]) == [(1, 3), (9, 12)]


def test_the_exposed_seconds_of_an_update() -> None:
    parts = [PartSeconds(send=1, update=4, receive=1)] * 2  # The values of the second are there after 9 s
    exposed = simulate_host_update(parts, reduced=[3, 4], needed=[0, 0], norm_s=0)
    assert (exposed.exposed_send_s, exposed.exposed_update_s) == (1, 9)
    assert exposed.seconds_by_resource == {"host link": 1, "host cores": 9}
    hidden = simulate_host_update(parts, reduced=[3, 4], needed=[0, 6], norm_s=2)
    assert (hidden.exposed_send_s, hidden.exposed_update_s) == (0, 5)  # The first is late by 5 s, the second by 3 s
    late = simulate_host_update(parts, reduced=[4, 4], needed=[6, 7], norm_s=0)
    assert (late.exposed_send_s, late.exposed_update_s) == (2, 2)
    for delay_s, exposed_s, resource in ((10, 2, "host link"), (5, 5, "host cores")):  # The cores work for 8 s
        delayed = simulate_host_update(parts, reduced=[3, 4], needed=[0, 0], norm_s=1, delay_s=delay_s)
        assert (delayed.exposed_send_s, delayed.exposed_update_s) == (0, exposed_s)
        assert delayed.seconds_by_resource[resource] == exposed_s
    assert late.busy_s == {"host cores": 8, "disk": 0, "host link": 2}


def with_host(**figures: Any) -> PlannedCluster:
    fast = {"memory_bytes": 1e14, "link_Bps": 1e17, "update_Bps": 1e17, "cores": 1, "scratch_Bps": 1e17}
    return replace(H100, host=HostSettings.model_validate(fast | figures))


def seconds(cluster: PlannedCluster, step: PlannedStep) -> float:
    return cluster.step_times.predict(step).seconds


LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"stage {zero}": {"dp": 8, "zero": zero, "microbatches": 2} for zero in range(4)},
    "1f1b": {"dp": 2, "pp": 4, "microbatches": 8, "zero": 1},
    "zb-v": {"dp": 2, "pp": 4, "chunks": 2, "schedule": "zb-v", "microbatches": 8, "zero": 1},
    "tp": {"dp": 4, "tp": 2, "sp": True, "zero": 1},
}


@pytest.mark.parametrize("name", ["stage 0", "stage 1", "stage 3"])
def test_the_slowest_resource_makes_the_step(name: str) -> None:
    """Eight ranks of a host share its cores and its disk; each has a link."""
    updated = COUNT if name == "stage 0" else COUNT / 8
    fast, step = with_host(), step_of(**LAYOUTS[name])
    base = seconds(fast, step)
    cores = seconds(with_host(update_Bps=1e9), step)
    assert cores - base == pytest.approx(12 * updated / (1e9 / 8), rel=1e-3)
    on_disk = replace(step, states="disk")
    disk = seconds(with_host(scratch_Bps=1e9), on_disk)
    assert disk - seconds(fast, on_disk) == pytest.approx(2 * 12 * updated / (1e9 / 8), rel=0.06)
    # Without overlap, sums go down and values up; rows of stage 3 are float32.
    plain = replace(step, communication=CommunicationSettings(overlap="none"))
    up = 4 if name == "stage 3" else 2
    link = seconds(with_host(link_Bps=1e8), plain)
    assert link - seconds(fast, plain) == pytest.approx((4 + up) * updated / 1e8, rel=1e-3)


def test_backward_hides_sums_and_the_next_forward_updates() -> None:
    step = step_of(dp=8, zero=1)
    durations = H100.step_times._simulation(replace(step, states="device")).durations
    forward_s, backward_s = sum(durations.forward_s), sum(durations.backward_s)
    slow = with_host(link_Bps=4 * COUNT / 8 / (0.5 * backward_s))  # Sums take half of a backward
    none, backward = (
        seconds(slow, replace(step, communication=CommunicationSettings.model_validate({"overlap": overlap})))
        - seconds(with_host(), replace(step, communication=CommunicationSettings.model_validate({"overlap": overlap})))
        for overlap in ("none", "backward")
    )
    assert none - backward == pytest.approx(0.5 * backward_s, rel=0.15)  # All but those of the first block
    cores = with_host(update_Bps=12 * COUNT / (3 * forward_s))  # An update takes three forwards
    times = {
        overlap: seconds(cores, step_of(dp=8, zero=1, overlap=overlap))
        - seconds(with_host(), step_of(dp=8, zero=1, overlap=overlap))
        for overlap in ("backward", "forward")
    }
    assert times["backward"] == pytest.approx(3 * forward_s, rel=0.01)
    assert times["forward"] == pytest.approx(2 * forward_s, rel=0.15)


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("overlap", ["none", "backward", "forward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_events_show_the_update(name: str, overlap: str, states: str) -> None:
    cluster = with_host(link_Bps=64e9, update_Bps=184e9, scratch_Bps=30e9)
    step, times = step_of(states, overlap=overlap, **LAYOUTS[name]), cluster.step_times
    predicted, events = times.predict(step), times.events(step)
    assert times.lower_bound(step) <= predicted.seconds * (1 + 1e-12)
    assert sum(predicted.parts.values()) == pytest.approx(predicted.seconds)
    ends = [e.stop_s for e in events if e.kind in ("host", "data") and "next step" not in e.name]
    assert max(ends) == pytest.approx(predicted.seconds)
    streams = defaultdict[tuple[int, str], list[StepEvent]](list)
    for event in events:
        if event.stream in ("host link", "host cores", "disk"):
            streams[event.rank, event.stream].append(event)
    shown = {"host link", "host cores"} | ({"disk"} if states == "disk" else set())
    assert {stream for _, stream in streams} == shown <= set(get_args(StepStream))
    for before, after in (pair for stream in streams.values() for pair in pairwise(stream)):
        assert before.stop_s <= after.start_s + 1e-9, (before, after)
    for rank in {event.rank for event in events}:
        rank_events = [event for event in events if event.rank == rank]
        norm = next(event.stop_s for event in rank_events if event.kind == "norm")
        first = min(event.start_s for event in rank_events if event.kind in ("update", "read"))
        assert (
            max(event.stop_s for event in rank_events if event.kind == "send") <= first + 1e-9 and norm <= first + 1e-9
        )
        updated = {e.name.split()[-1]: e.stop_s for e in rank_events if e.kind == "update"}
        received = {e.name.split()[-1]: e.start_s for e in rank_events if e.kind == "receive"}
        assert updated.keys() == received.keys()
        assert all(received[part] >= stop - 1e-9 for part, stop in updated.items())


def test_a_step_hides_a_delayed_update() -> None:
    """The step takes the longer of its own work and that of the cores; values that come up are exposed."""
    exact = step_of(dp=8, zero=1)
    delayed = replace(exact, delays_update=True)
    base = seconds(with_host(), replace(exact, states="device"))
    up_s = 2 * COUNT / 8 / 64e9
    quick = with_host(link_Bps=64e9, update_Bps=12 * COUNT / (0.5 * base))
    assert seconds(quick, exact) > 1.4 * base
    assert seconds(quick, delayed) == pytest.approx(seconds(with_host(), delayed) + up_s, rel=0.01)
    slow = with_host(link_Bps=64e9, update_Bps=12 * COUNT / (3 * base))
    assert seconds(slow, delayed) == pytest.approx(3 * base + up_s, rel=0.01)
    host = estimate_memory(delayed).on_fullest_host("host", 8)
    assert (host["pending gradients"], host["new values"]) == (4 * COUNT, 2 * COUNT)
    events = quick.step_times.events(delayed)
    assert min(event.start_s for event in events if event.kind == "update") == 0.0
    norm = next(event.stop_s for event in events if event.kind == "norm")
    assert min(event.start_s for event in events if event.kind == "receive") >= norm
    assert max(event.stop_s for event in events) == pytest.approx(seconds(quick, delayed))


def test_the_sums_of_stage_3_travel_after_backward() -> None:
    step = step_of(dp=8, zero=3, microbatches=2)
    slow, fast = with_host(link_Bps=1e9), with_host()
    assert seconds(slow, step) - seconds(fast, step) == pytest.approx((4 + 4) * COUNT / 8 / 1e9, rel=0.01)


def test_a_place_without_its_speed_is_refused() -> None:
    without = replace(H100, host=None)
    refused(r"its file has no section \[host\]; add one, or set memory.optimizer=device", seconds, without, step_of())
    host = HostSettings.model_validate({"memory_bytes": 1e12, "link_Bps": 1e9, "update_Bps": 1e9, "cores": 4})
    no_disk = replace(H100, host=host)
    assert seconds(no_disk, step_of()) > 0
    refused("has no scratch_Bps; add it, or set memory.optimizer=host", seconds, no_disk, step_of("disk"))
    rates = HostRates.for_rank(host.model_copy(update={"scratch_Bps": BytesPerSecondSetting(value=8)}), 4, on_disk=True)
    assert rates == HostRates(1e9, 0.25e9, 2.0)


# --- rankings ----------------------------------------------------------------------------------------

ONE_DEVICE = ("plan", "llama3-8b", "data.batch_sequences=8", "data.sequence_length=4096", "--gpus", "1")


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, InputError):
        return str(result.exception)
    assert result.exception is None, result.exception
    return result.stdout


def cluster_file(folder: Path, *, host: str | None = None) -> str:
    """A DGX H100 with another section [host], or without one."""
    path = folder / "mine.toml"
    path.write_text(cluster_presets()["h100"].partition("[host]")[0] + (f"[host]\n{host}" if host else ""))
    return str(path)


def test_a_ranking_says_which_place_makes_layouts_fit(tmp_path: Path) -> None:
    text = run(*ONE_DEVICE, "--cluster", "h100")
    assert "optimizer=host" in text and "optimizer=disk" not in text
    assert "No layout fits with masters and moments on the devices; of the others, " in text
    assert "host of the first, for all ranks of a host: master parameters " in text
    report = json.loads(run(*ONE_DEVICE, "--cluster", "h100", "--json", "--top", "1"))["plans"][0]
    count = 8030261248  # The parameters of llama 3 8B
    assert report["optimizer"] == "host" and report["layout"].endswith("optimizer=host")
    sizes = {"master parameters": 4 * count, "moments": 8 * count, "gradients that were sent": 4 * count}
    assert report["host_bytes"] == sizes and report["disk_bytes"] == {}
    assert report["step_time_error"] is None and report["memory_error"] is None
    assert report["time_s"]["host cores"] == pytest.approx(12 * count / 184e9, rel=0.02)
    small = "memory_bytes = 60e9\nlink_Bps = 64e9\nupdate_Bps = 184e9\ncores = 112\nscratch_Bps = 30e9"
    text = run(*ONE_DEVICE, "--cluster", cluster_file(tmp_path, host=small))
    assert "optimizer=disk" in text and "optimizer=host" not in text and "fit with memory.optimizer=disk" in text
    assert "disk of the first, for all ranks of a host: master parameters 29.9 GiB, moments 59.8 GiB" in text
    text = run(*ONE_DEVICE, "--cluster", cluster_file(tmp_path, host=small.partition("\nscratch")[0]))
    assert "fits nowhere" in text and "optimizer=host" in text
    assert "the rank of a host: 120 GiB of its memory > 50.3 GiB" in text


def test_only_layouts_that_do_not_fit_are_tried(tmp_path: Path) -> None:
    without = cluster_file(tmp_path)
    missing = "states on the host are not tried, because cluster mine has no section [host]"
    assert missing in run(*ONE_DEVICE, "--cluster", without)
    text = run(*ONE_DEVICE, "--cluster", "h100", "memory.optimizer=device")
    assert "fits nowhere" in text and "optimizer=host" not in text
    many = ("plan", "llama3-8b", "data.batch_sequences=16", "data.sequence_length=4096", "--gpus", "4", "--top", "1")
    text = run(*many, "--cluster", "h100")
    assert "optimizer=" not in text and "masters and moments on the devices" not in text
    explicit = run(*many, "--cluster", "h100", "memory.optimizer=host", "--json")
    assert {plan["optimizer"] for plan in json.loads(explicit)["plans"]} == {"host"}
    assert "no section [host]" in run(*many, "--cluster", without, "memory.optimizer=host")
    text = run(*many, "--cluster", "h100", "memory.optimizer=host", "--stack", "megatron")
    assert "memory.optimizer = 'host' is planned for motet, not for the framework 'megatron'" in text


def test_a_layout_names_its_place(tmp_path: Path) -> None:
    chosen = "--layout", "dp=1 zero=0 microbatches=8 recompute=full optimizer=disk"
    report = json.loads(run(*ONE_DEVICE, "--cluster", "h100", *chosen, "--json"))["plans"][0]
    assert report["layout"].endswith("recompute=full optimizer=disk") and report["fits"]
    text = run(*ONE_DEVICE, "--cluster", "h100", "--layout", "optimizer=tape")
    assert text == "optimizer = 'tape' in a layout: use one of device, host, disk"
    job = tmp_path / "job.toml"
    text = run(*ONE_DEVICE, "--cluster", "h100", *chosen, "--write", str(job))
    assert text.startswith("--write: the layout ") and "memory.optimizer=disk memory.folder=FOLDER" in text
    run(*ONE_DEVICE, "--cluster", "h100", "--write", str(job))
    assert 'optimizer = "host"' in job.read_text()
