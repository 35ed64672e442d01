"""Torch's own tests of a distributed backend on the backend `motet`: a sample, and all of them with `make proof`.

`torch_suite.json` holds how each of them ends, and the page of the backend counts them. `pytest -m proof --regenerate
tests/collectives/test_torch_suite.py` writes both anew.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch_suite

from ranks import RankFailureError, Ranks

FILE = Path(__file__).with_name("torch_suite.json")
PAGE = Path(__file__).parents[2] / "docs/reference/backend-motet.md"
OUTCOMES: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
PASSES, FAILS, LEFT_OUT = "passes", "does not pass", "left out: "

SENTENCE = "expects the words of Gloo on the ranks to which rank 0 did not answer; ours say the same in others"
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "expects that DDP logs the backend as `gloo`; it logs `motet`",
    "test_monitored_barrier_failure_order": SENTENCE,
    "test_monitored_barrier_gloo": SENTENCE,
}

SAMPLE = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_group",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_max",
    "test_all_reduce_group_min",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_full_group",
    "test_gather_object_subgroup",
    "test_get_rank_size_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend",
    "test_monitored_barrier_wait_all_ranks",
    "test_new_subgroups_with_group_param",
    "test_reduce_group_product",
    "test_reduce_max",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Ranks of their own: torch's module for tests changes the settings of the process that imports it."""
    pool = Ranks()
    yield pool
    pool.close()


def outcome(ranks: Ranks, name: str) -> str:
    try:
        reasons = set(ranks.run_places(torch_suite.WORLD, torch_suite.run, name))
    except RankFailureError as failure:
        if name in EXCEPTIONS and " failed: AssertionError: " in str(failure):
            return FAILS
        raise
    assert len(reasons) == 1, reasons
    reason = reasons.pop()
    return f"{LEFT_OUT}{reason}" if reason else PASSES


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(four: Ranks, name: str) -> None:
    assert outcome(four, name) == PASSES


@pytest.mark.proof
@pytest.mark.parametrize("name", OUTCOMES)
def test_each(four: Ranks, name: str) -> None:
    """One that begins to pass, or is no longer left out, is told as well."""
    assert outcome(four, name) == OUTCOMES[name]


@pytest.mark.proof
def test_no_test_of_torch_is_missing(four: Ranks, regenerate: bool) -> None:
    names = four.run_places(1, torch_suite.names)[0]
    if regenerate:
        found = {name: outcome(four, name) for name in names}
        FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        start, _, end = parts(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(start + counted(found) + end, encoding="utf-8")
    assert names == list(json.loads(FILE.read_text(encoding="utf-8")))


def test_each_that_does_not_pass_has_a_reason() -> None:
    assert {name for name, end in OUTCOMES.items() if end == FAILS} == set(EXCEPTIONS)
    assert {OUTCOMES[name] for name in SAMPLE} == {PASSES}


def test_the_page_counts_them() -> None:
    assert parts(PAGE.read_text(encoding="utf-8"))[1] == counted(OUTCOMES)


def parts(page: str) -> tuple[str, str, str]:
    """The text before, in and after the generated part of the page."""
    start, mark, rest = page.partition("<!-- counted -->\n")
    middle, other, end = rest.partition("<!-- end -->\n")
    return start + mark, middle, other + end


def counted(outcomes: dict[str, str]) -> str:
    ends = Counter(outcomes.values())
    left = {end.removeprefix(LEFT_OUT): n for end, n in ends.most_common() if end.startswith(LEFT_OUT)}
    run = ends[PASSES] + ends[FAILS]
    lines = [
        f"Of the {len(outcomes)} tests {run} can be run, and {ends[PASSES]} of these pass "
        f"({100 * ends[PASSES] / run:.1f} %); the sample has {len(SAMPLE)}. "
        f"{sum(left.values())} are left out by torch.",
        *("", "| does not pass | because it |", "|---|---|"),
        *(f"| `{name}` | {reason} |" for name, reason in EXCEPTIONS.items()),
        *("", "| torch's reason to leave tests out | tests |", "|---|---|"),
        *(f"| {reason.replace('{', '').replace('}', '')} | {n} |" for reason, n in left.items()),
    ]
    return "\n".join(["", *lines, "", ""])
