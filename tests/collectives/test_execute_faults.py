"""Messages on ranks that disagree, on a missing rank, and on tensors that cannot work."""

import contextlib
from dataclasses import replace

import pytest
import torch

from motet.collectives import build
from motet.collectives.execute.api import all_gather, all_reduce, all_to_all, broadcast
from motet.collectives.execute.program_runner import P2PBatch, P2PChannel, P2PTensor, PeerTransferError, run_program
from motet.collectives.execute.work_queue import WorkQueue
from motet.collectives.program import ChunkTransfer, Program
from motet.core.errors import InputError
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import CpuBackend, RankGroup, start_process_group
from on_ranks import group_of
from ranks import Ranks


def refusals(group: RankGroup) -> list[str]:
    """Each is raised on all ranks, and nothing is left behind: the next one works."""
    odd, ring, memory = group.rank == 1, build("all-reduce", "ring", 3), torch.ones(7)
    other = replace(ring, steps=ring.steps[:2] + ring.steps[2:][::-1])
    calls = [
        lambda: all_reduce(torch.ones(3 + odd), group, algorithm="ring"),
        lambda: all_reduce(torch.ones(2, 3) if odd else torch.ones(3, 2), group, algorithm="ring"),
        lambda: all_reduce(torch.ones(4, dtype=torch.float16 if odd else torch.float32), group, algorithm="ring"),
        lambda: all_reduce(torch.ones(4), group, algorithm="ring", op="max" if odd else "sum"),
        lambda: all_reduce(torch.ones(4), group, algorithm="tree" if odd else "ring"),
        lambda: run_program(other if odd else ring, *[torch.ones(4)] * 2, group_of(group)),
        lambda: broadcast(torch.ones(4), group, root=int(odd), algorithm="tree"),
        lambda: all_reduce(torch.ones(4, 4).T if odd else torch.ones(4, 4), group, algorithm="ring"),
        lambda: all_gather(torch.ones(7), torch.ones(3), group, algorithm="ring"),
        lambda: run_program(build("all-reduce", "ring", 2), *[torch.ones(4)] * 2, group_of(group)),
        lambda: run_program(ring, None, None, group_of(group)),
        lambda: run_program(ring, torch.ones(4), torch.ones(4, dtype=torch.int8), group_of(group)),
        lambda: all_reduce(torch.ones(4), group, algorithm="ring", op="median"),
        lambda: run_program(ring, memory[1:], memory[:-1], group_of(group)),
    ]
    said = []
    for call in calls:
        try:
            call()
        except InputError as error:
            said.append(str(error))
        tensor = torch.ones(4)
        all_reduce(tensor, group, algorithm="ring")
        assert tensor.tolist() == [3.0] * 4
    return said


def test_ranks_that_do_not_agree_are_told_before_anything_moves(ranks: Ranks) -> None:
    said, ring = ranks.run(3, refusals), "all-reduce/ring of 3 ranks"
    everywhere = [
        f": ranks 0, 2 do {ring} (sum) on 3 float32 on cpu of shape (3,); rank 1 does {ring} (sum) on 4 float32",
        f"6 float32 on cpu of shape (3, 2); rank 1 does {ring} (sum) on 6 float32 on cpu of shape (2, 3)",
        f"4 float32 on cpu of shape (4,); rank 1 does {ring} (sum) on 4 float16",
        f"ranks 0, 2 do {ring} (sum) on 4 float32 on cpu of shape (4,); rank 1 does {ring} (max) on",
        f"ranks 0, 2 do {ring} (sum) on 4 float32 on cpu of shape (4,) (",
        f"ranks 0, 2 do {ring} (sum) on 4 float32 on cpu of shape (4,) (",
        "ranks 0, 2 do broadcast/tree of 3 ranks on 4 float32 on cpu of shape (4,) (",
    ]
    for number, sentence in enumerate(everywhere):
        for rank in range(3):
            assert sentence in said[rank][number] and said[rank][number].startswith("ranks make different calls")
    assert said[1][7].startswith(f"{ring}: rank 1 gave a tensor of shape (4, 4) that is not contiguous")
    assert said[0][7] == said[2][7] == f"rank 1 rejects the call: {said[1][7]}"
    elements = "all-gather/ring of 3 ranks: the input of rank {} has 3 elements; give 2"
    assert said[1][8] == elements.format(1) and said[2][8] == f"rank 0 rejects the call: {elements.format(0)}"
    world = "all-reduce/ring of 2 ranks cannot be executed by 3 ranks; build it for the ranks of the group"
    for rank in range(3):
        assert said[rank][9] == world and said[rank][10] == f"{ring}: rank {rank} takes part, but gave no tensor"
        assert "gave float32 on cpu and int8 on cpu" in said[rank][11]
        assert said[rank][12] == "op 'median' is unknown; use one of sum, avg, product, min, max, band, bor, bxor"
        assert said[rank][13] == f"{ring}: input and output of rank {rank} overlap; give tensors that share no memory"


STEPS = ((ChunkTransfer(0, 1, 0, 0, "reduce"),),)
WRONG = Program("all-reduce", "half", 2, (1,), ((0,), (0,)), ({0: (0, 1)}, {0: (0, 1)}), STEPS)


def own_programs(group: RankGroup) -> list[str]:
    said, ones = [], torch.ones(4)
    for call in (
        lambda: all_reduce(ones, group, algorithm=WRONG),
        lambda: all_reduce(ones, group, algorithm=build("broadcast", "tree", 2)),
        lambda: broadcast(ones, group, algorithm=build("broadcast", "tree", 2, root=1)),
        lambda: all_reduce(ones, group, algorithm="rings"),
        lambda: all_to_all(ones, ones, group, sizes=[[1, 2]], algorithm="pairwise"),
    ):
        with pytest.raises(InputError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_programs_that_cannot_be_meant(ranks: Ranks) -> None:
    wrong, foreign, root, unknown, sizes = ranks.run(2, own_programs)[0]
    assert wrong == "all-reduce/half of 2 ranks is wrong at the end: chunk 0 of rank 0 does not contain rank 1"
    assert foreign == "broadcast/tree of 2 ranks is not a Program for all-reduce; give one of that collective"
    assert root == "broadcast/tree of 2 ranks has root 1, not 0; give root= as the Program has it"
    assert "nearest: ring" in unknown
    assert sizes.startswith("sizes: all-to-all/pairwise of 2 ranks needs 2 rows of 2 counts")


def one_is_missing(place: RankEnvironment, asynchronous: bool, backend: CpuBackend) -> str:
    """Rank 1 does not come to the second of two; on rank 0 it is underway already."""
    said = ""
    # No farewell in a broken group.
    with contextlib.suppress(RuntimeError), start_process_group(place, "cpu", 3.0, cpu_backend=backend) as group:
        all_reduce(torch.ones(4), group, algorithm="ring")
        try:
            if group.rank == 1:
                channel = P2PChannel(group_of(group), None, 1)
                P2PBatch([P2PTensor(0, torch.empty(1))], [], channel, context="a message").wait()
            else:
                call = {"algorithm": "ring", "check": False, "timeout_s": 0.3, "async_op": asynchronous}
                all_reduce(torch.ones(4), group, **call).wait()
        except PeerTransferError as error:
            said = str(error)
    return said


@pytest.mark.parametrize(("backend", "limit"), [("gloo", "300ms"), ("motet", "within 0.3 s")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_does_not_come_is_named(ranks: Ranks, asynchronous: bool, backend: CpuBackend, limit: str) -> None:
    first, second = ranks.run_places(2, one_is_missing, asynchronous, backend)
    where = "rank 0 waited in vain for rank 1 in step 0 of all-reduce/ring of 2 ranks: that rank has ended, is"
    assert first.startswith(where) and limit in first
    assert second.startswith("rank 1 waited in vain for rank 0 in a message")


def test_a_queue_goes_on_after_a_task_that_failed() -> None:
    queue, done = WorkQueue(), []

    def fail() -> None:
        raise ValueError("no")

    works = [queue.submit(fail), queue.submit(lambda: done.append(1))]
    queue.run(lambda: done.append(2))
    with pytest.raises(ValueError, match="no"):
        works[0].wait()
    works[1].wait()
    with pytest.raises(ValueError, match="no"):
        queue.run(fail)
    queue.run(lambda: done.append(3))
    queue.close()
    assert done == [1, 2, 3]
