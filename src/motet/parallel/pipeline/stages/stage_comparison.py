"""Comparison of stages with the whole module: what they send, the loss, gradients and buffers."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stages.stage_trial import LOSS, StageTrials, TrialRun, is_same
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.proof.comparison import ProofMismatchError, gradient_comparisons
from motet.parallel.proof.nested_tensors import Path

COMPARED = 2  # Forwards in which stages are compared with the whole; more of them show what sizes are proportional to


def compare_stages(
    trials: StageTrials, sharding: ModelSharding, held: Sequence[AbstractSet[str]]
) -> dict[str, tuple[int, ...]]:
    """Run each stage forward and backward with what the whole sends it; raises ProofMismatchError.

    `held` are the parameters of each stage. Returns the stages on which buffers outside of blocks have their values.
    """
    right_buffers = set[tuple[int, str]]()
    for index in range(len(trials.wholes))[:COMPARED]:
        right_buffers |= _compare_forward(trials, sharding, held, index=index)
    return _stages_of_buffers(trials, sharding.stages, right_buffers)


def _compare_forward(
    trials: StageTrials, sharding: ModelSharding, held: Sequence[AbstractSet[str]], *, index: int
) -> set[tuple[int, str]]:
    """Compare all stages in one forward. Returns (stage, buffer) of each buffer that is that of the whole after it."""
    trials.module.zero_grad()
    gradients_of_whole, reference = trials.gradients_of_whole(index), trials.wholes[index]
    trials.forget(index)
    gradients, right_buffers = dict[Path, Tensor | None](), set[tuple[int, str]]()
    for stage in reversed(range(len(held))):
        expected = trials.expected_after(index, sharding.stages[stage])
        with trials.stage_run(index, stage, held[stage], sharding=sharding) as run:
            for path, result in run.results.items():
                if not is_same(result, expected[path]):
                    blocks = [trials.names[block] for block in sharding.stages[stage]]
                    raise ProofMismatchError(_explain(run, reference, blocks, path=path))
            gradients = run.differentiate(gradients)
        right_buffers |= {(stage, name) for name, b in run.buffers.items() if is_same(b, reference.buffers[name])}
    sums = trials.pop_gradients()
    for each in gradient_comparisons(trials.module, gradients_of_whole):
        problem = f"the gradients of {each.name} on its stages do not add up to that of the whole"
        each.check(sums.get(each.name), problem)
    return right_buffers


def _explain(run: TrialRun, reference: TrialRun, blocks: Sequence[str], *, path: Path) -> str:
    """Why a result of a stage of these blocks is wrong."""
    for name in blocks:
        call, expected = run.call(name), reference.call(name)
        if all(is_same(call.left.get(at), value) for at, value in expected.left.items()):
            continue
        wrong = [at for at, value in expected.entered.items() if not is_same(call.entered.get(at), value)]
        if not wrong:
            return f"block {name} reads something that earlier blocks left, and that is none of its arguments"
        source = f"is computed from earlier blocks than {blocks[0]}, and is none of its arguments"
        return f"{_text_of(wrong[0], name)} {source}"
    names = list(reference.calls)
    after = "the loss" if path == LOSS else _text_of(path, names[names.index(blocks[-1]) + 1])
    return f"{after} is computed from earlier blocks than {blocks[0]}, and not from its arguments alone"


def _text_of(path: Path, block: str) -> str:
    return f"argument {'.'.join(map(str, path))} of block {block}"


def _stages_of_buffers(
    trials: StageTrials, stages: Sequence[range], right_buffers: AbstractSet[tuple[int, str]]
) -> dict[str, tuple[int, ...]]:
    """Stages on which each buffer outside of blocks has its values after a forward."""
    before, after, stages_of = trials.buffers_before, trials.wholes[0].buffers, dict[str, tuple[int, ...]]()
    of_block = {id(buffer): i for i, name in enumerate(trials.names) for buffer in trials.blocks[name].buffers()}
    for name, buffer in persistent_buffers(trials.module).items():
        block = of_block.get(id(buffer))
        wanted = {i for i, blocks in enumerate(stages) if block is None or block in blocks}
        is_changed = not is_same(after[name], before[name])
        holders = {stage for stage in wanted if not is_changed or (stage, name) in right_buffers}
        if not holders:
            problem = f"no stage has the values of buffer {name}, which blocks of several stages change"
            raise ProofMismatchError(problem, tensor=name)
        stages_of |= {} if block is not None else {name: tuple(sorted(holders))}
    return stages_of
