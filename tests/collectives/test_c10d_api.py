"""Calls of torch's c10d API that work on the backend `motet`, and on Gloo: each case on ranks of both.

`c10d_api.json` holds how each case ends, and the page of the backend lists them. `make proof` runs all on 2 and 3
ranks, `make test` a sample. `pytest -m proof --regenerate tests/collectives/test_c10d_api.py` writes both anew.
"""

import json
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import c10d_parallel_cases  # noqa: F401  (adds its cases)
import motet.collectives.shm_backend  # noqa: F401  (registers it)
from c10d_cases import CASES
from environment import needs_torch_2_13
from motet.parallel.process.launch_environment import RankEnvironment
from ranks import RankFailureError, Ranks

FILE = Path(__file__).with_name("c10d_api.json")
PAGE = Path(__file__).parents[2] / "docs/reference/backend-motet.md"
START, END = "<!-- api -->\n", "<!-- api end -->\n"
BACKENDS = ("gloo", "motet")
WORKS, FAILS = "works", "does not"
OUTCOMES: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
SAMPLE_NAMES = """
    sum_of_booleans uneven_reduce_scatter uneven_all_gather numpy_split_sizes methods_in_place methods_with_outputs
    sequence_numbers devices futures version_counters losses_of_replicas waiting_outside messages_in_inference
    functional_autograd functional_out two_in_place two_with_outputs two_distributed refusing_subclass fake_tensors
    dispatch_modes comm_debug_mode profiler_events built_in_float16_hook backward_beside_another_collective
    sharded_with_memory_of_the_group broadcast_states asynchronous_checkpoints
"""
SAMPLE = SAMPLE_NAMES.split()


def run(place: RankEnvironment, name: str, backend: str) -> None:
    store = dist.FileStore(place.rendezvous.removeprefix("file://"), place.world)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo" if backend == "gloo" else f"cpu:{backend}",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=30),
    )
    try:
        CASES[name].run(place.rank, place.world)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def outcome(ranks: Ranks, name: str, backend: str, world: int) -> str:
    if backend == "gloo" and CASES[name].gloo_note:
        return CASES[name].gloo_note
    try:
        ranks.run_places(world, run, name, backend)
    except RankFailureError as failure:
        if backend == "gloo":
            return FAILS
        kind, _, reason = str(failure).splitlines()[0].partition(" failed: ")[2].partition(": ")
        return f"{kind}: {reason.partition(' (expected')[0]}"
    return WORKS


_SINCE_2_13 = {"functional_autograd": "operators of collectives refuse gradients that are expanded"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=needs_torch_2_13(_SINCE_2_13[each])) if each in _SINCE_2_13 else each for each in SAMPLE],
)
def test_sample(ranks: Ranks, name: str) -> None:
    ranks.run_places(2, run, name, "motet")


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_each(ranks: Ranks, name: str, backend: str, regenerate: bool) -> None:
    ends = {outcome(ranks, name, backend, world) for world in (2, 3)}
    assert len(ends) == 1, ends
    if regenerate:
        known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        known.setdefault(name, {})[backend] = ends.pop()
        FILE.write_text(json.dumps({each: known[each] for each in CASES if each in known}, indent=1) + "\n")
    else:
        assert ends == {OUTCOMES[name][backend]}


def test_none_fails_that_works_on_gloo_but_those_that_name_it() -> None:
    assert list(OUTCOMES) == list(CASES)
    assert {OUTCOMES[name]["motet"] for name in SAMPLE} == {WORKS}
    worse = [name for name, ends in OUTCOMES.items() if ends["gloo"] == WORKS != ends["motet"]]
    assert worse == ["monitored_barrier"]


def test_the_page_lists_them(regenerate: bool) -> None:
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index(START) + len(START), page.index(END)
    if regenerate:
        PAGE.write_text(page[:start] + listed() + page[end:], encoding="utf-8")
    else:
        assert page[start:end] == listed()


def listed() -> str:
    lines = []
    for part in dict.fromkeys(each.part for each in CASES.values()):
        lines += ["", f"| {part} | Gloo | `motet` |", "|---|---|---|"]
        lines += [
            f"| {each.title} | {OUTCOMES[name]['gloo']} | {OUTCOMES[name]['motet']} |"
            for name, each in CASES.items()
            if each.part == part
        ]
    return "\n".join([*lines, "", ""])
