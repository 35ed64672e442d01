"""Comparison of stages with the whole module: what they send, the loss, gradients and buffers."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stages.stage_trial import LOSS, StageTrials, TrialRun
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.proof.comparison import ProofMismatchError, is_close, typical_size
from motet.parallel.proof.nested_tensors import Path

is_same = partial(is_close, nan_is_equal=True)


class StageComparison:
    """Stages that hold these parameters, and the whole."""

    def __init__(self, trials: StageTrials, sharding: ModelSharding, held: Sequence[set[str]]) -> None:
        self._trials, self._sharding, self._held = trials, sharding, held
        self._parameters = dict(trials.module.named_parameters())
        self._right_buffers: dict[str, set[int]] = {}  # Name -> stages on which it is that of the whole

    def compare(self, index: int) -> None:
        """Run each stage forward and backward with what the whole sends it; raises ProofMismatchError."""
        scales = self._whole_backward(index)
        self._trials.forget(index)
        gradients = dict[Path, Tensor | None]()
        for stage in range(len(self._held) - 1, -1, -1):
            expected = self._trials.expected_after(index, self._sharding.stages[stage])
            with self._trials.stage_run(index, stage, self._held[stage], sharding=self._sharding) as run:
                for path, result in run.results.items():
                    if not is_same(result, expected[path]):
                        raise ProofMismatchError(self._explain(index, stage, path, run=run))
                gradients = _run_backward(run, gradients)
            for name, buffer in run.buffers.items():
                if is_same(buffer, self._trials.wholes[index].buffers[name]):
                    self._right_buffers.setdefault(name, set()).add(stage)
        for name, parameter in self._parameters.items():
            rest, parameter.grad = parameter.grad, None
            if rest is not None and not is_close(rest, rest.new_zeros(()).expand_as(rest), scales[name]):
                size = float(rest.abs().max())
                problem = f"the gradients of {name} on its stages differ from that of the whole by {size:.1e}"
                raise ProofMismatchError(problem, tensor=name)

    def stages_of_buffers(self) -> dict[str, tuple[int, ...]]:
        """Stages on which each buffer outside of blocks has its values after a forward."""
        trials, stages = self._trials, self._sharding.stages
        before, after = trials.buffers_before, trials.wholes[0].buffers
        of_block = {id(buffer): i for i, name in enumerate(trials.names) for buffer in trials.blocks[name].buffers()}
        right = dict[str, tuple[int, ...]]()
        for name, buffer in persistent_buffers(trials.module).items():
            block = of_block.get(id(buffer))
            wanted = {i for i in range(len(stages)) if block is None or block in stages[i]}
            is_changed = not is_same(after[name], before[name])
            holders = wanted & (self._right_buffers.get(name, set()) if is_changed else wanted)
            if not holders:
                problem = f"no stage has the values of buffer {name}, which blocks of several stages change"
                raise ProofMismatchError(problem, tensor=name)
            right |= {} if block is not None else {name: tuple(sorted(holders))}
        return right

    def _whole_backward(self, index: int) -> dict[str, float]:
        """Let parameters have the negative gradients of the whole; returns the norm that is large for each."""
        with self._trials.whole_run(index) as run:
            _run_backward(run, {})
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        typical = typical_size(gradients.values())  # Some gradients are zero but for rounding
        norms = {name: float(gradient.neg_().norm()) for name, gradient in gradients.items()}
        return {n: max(norms.get(n, 0.0), typical * sqrt(p.numel())) for n, p in self._parameters.items()}

    def _explain(self, index: int, stage: int, path: Path, *, run: TrialRun) -> str:
        """Why a result of a stage is wrong."""
        names, blocks, reference = self._trials.names, self._sharding.stages[stage], self._trials.wholes[index]
        first = names[blocks.start]
        for name in (names[block] for block in blocks):
            call, expected = run.call(name), reference.call(name)
            if all(is_same(call.left.get(at), value) for at, value in expected.left.items()):
                continue
            wrong = [at for at, value in expected.entered.items() if not is_same(call.entered.get(at), value)]
            if not wrong:
                return f"block {name} reads something that earlier blocks left, and that is none of its arguments"
            return (
                f"{_text_of(wrong[0], name)} is computed from earlier blocks than {first}, and is none of its arguments"
            )
        after = "the loss" if path == LOSS else _text_of(path, names[blocks.stop])
        return f"{after} is computed from earlier blocks than {first}, and not from its arguments alone"


def _run_backward(run: TrialRun, gradients: Mapping[Path, Tensor | None]) -> dict[Path, Tensor | None]:
    """Add the gradients of a run to parameters; returns those of what a stage received."""
    pairs = [(tensor, gradients.get(path)) for path, tensor in run.results.items() if tensor.requires_grad]
    pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None or LOSS in run.results]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    return {path: tensor.grad for path, tensor in run.received.items()}


def _text_of(path: Path, block: str) -> str:
    return f"argument {'.'.join(map(str, path))} of block {block}"
