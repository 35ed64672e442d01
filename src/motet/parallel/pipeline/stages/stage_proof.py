"""Stages of any module, proven by running them one after another in one process against the whole module.

What a stage needs of others shows as NaN: the arguments of its first block are wires, and anything else is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.parallel.model_sharding import BlockOutput, ModelSharding, StageWire
from motet.parallel.pipeline.stages.block_forms import describe_output, describe_sizes
from motet.parallel.pipeline.stages.stage_balance import check_stages
from motet.parallel.pipeline.stages.stage_comparison import compare_stages
from motet.parallel.pipeline.stages.stage_trial import SizedForward, StageTrials, is_same
from motet.parallel.process.module_inventory import inventory_of_module
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.proof.nested_tensors import Path, tensors_by_path, value_at
from motet.parallel.proof.proof_values import random_values


def prove_stages(
    module: nn.Module,
    forwards: Sequence[SizedForward],
    stages: Sequence[range] | Callable[[Sequence[str]], Sequence[range]],
    *,
    prepare: Callable[[], object] | None = None,
) -> ModelSharding:
    """The stages of a module, whose parameters may be on the meta device: their tensors, and what crosses borders.

    The forwards, at least two, differ in their sizes. `stages` are blocks in the order in which a forward calls them,
    or a function of their names in this order.
    """
    with random_values(module, recomputes=True, keeps_frozen=True):
        if prepare is not None:
            with torch.no_grad():
                prepare()
        proof = _StageProof(module, forwards)
        return proof.prove(stages(proof.names) if callable(stages) else stages)


class _StageProof:
    """The search for the parameters that each stage holds and for the wires between stages."""

    def __init__(self, module: nn.Module, forwards: Sequence[SizedForward]) -> None:
        self.trials, self.module = StageTrials(module, forwards), module
        self.parameters, self.names = dict(module.named_parameters()), self.trials.names
        blocks = [self.trials.blocks[name] for name in self.names]
        self.block_of = {parameter: i for i, block in enumerate(blocks) for parameter in block.parameters()}
        self.outside = {name for name, parameter in self.parameters.items() if parameter not in self.block_of}

    def prove(self, stages: Sequence[range]) -> ModelSharding:
        """Find what stages need, and compare them with the whole."""
        check_stages(stages, len(self.names), type(self.module).__name__)
        self.sharding = ModelSharding(
            stages=tuple(stages), block_names=tuple(self.names), block_outputs=self._block_outputs()
        )
        problem: InputError | None = None
        for held in self._candidates():
            try:
                return self._proven(held)
            except InputError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _block_outputs(self) -> tuple[BlockOutput, ...]:
        """The form of what each block returns."""
        calls = [[run.call(name) for run in self.trials.wholes] for name in self.names]
        return tuple(describe_output([c.output for c in of], [c.arguments for c in of]) for of in calls)

    def _backwards(self) -> range:
        """Stages from the last to the first, so that none runs after an earlier one has left real values."""
        return range(len(self.sharding.stages) - 1, -1, -1)

    def _candidates(self) -> Iterator[list[set[str]]]:
        """Parameters of each stage, by name: those of its blocks, and more and more of those outside of blocks."""
        stages = self.sharding.stages
        in_blocks = [{n for n, p in self.parameters.items() if self.block_of.get(p, -1) in blocks} for blocks in stages]
        needed = self._needed_outside(in_blocks)
        others = self.outside.difference(*needed)  # A gradient does not show which stage uses them, if any does
        tensors = [tensor for tensor in inventory_of_module(self.module, {}).tensors if tensor.name in others]
        default = [{t.name for t in tensors if i in self.sharding.stages_of(t)} for i in range(len(stages))]
        replaced = self._without_wires(in_blocks, needed)
        for outside, more in ((replaced, default), (needed, default), (needed, [others] * len(stages))):
            yield [a | b | c for a, b, c in zip(in_blocks, outside, more, strict=True)]

    def _needed_outside(self, in_blocks: Sequence[set[str]]) -> list[set[str]]:
        """The parameters outside of blocks that each stage reads, if it has all of them."""
        flags = {parameter: parameter.requires_grad for parameter in self.parameters.values()}
        for name in self.outside:
            self.parameters[name].requires_grad_(True)
        self.trials.forget(0)
        needed = [self._study(stage, in_blocks[stage] | self.outside)[1] for stage in self._backwards()]
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        return needed[::-1]

    def _without_wires(self, in_blocks: Sequence[set[str]], needed: Sequence[set[str]]) -> list[set[str]]:
        """The same, without parameters of which an earlier stage computes something that can be sent."""
        fewer = [set(names) for names in needed]
        for stage in self._backwards():
            for name in needed[stage].intersection(set().union(*needed[:stage])):
                held = in_blocks[stage] | fewer[stage]
                if self._study(stage, held)[0] <= self._study(stage, held - {name})[0]:
                    fewer[stage].discard(name)
        return fewer

    def _study(self, stage: int, held: set[str]) -> tuple[set[Path], set[str]]:
        """(Paths to what is right after a stage; names of parameters outside of blocks that it is computed from)."""
        expected = self.trials.expected_after(0, self.sharding.stages[stage])
        wires = {stage: self._wires_into(0, stage, held), stage + 1: list(expected)}
        with self.trials.stage_run(0, stage, held, sharding=_with_wires(self.sharding, wires)) as run:
            right = {path for path, value in expected.items() if is_same(run.results.get(path), value)}
            behind = parameters_behind(run.results.values())
        return right, {name for name in self.outside if self.parameters[name] in behind}

    def _wires_into(self, index: int, stage: int, held: set[str]) -> list[Path]:
        """The arguments of a stage's first block that the stage does not compute itself."""
        stages, first = self.sharding.stages, self.sharding.stages[stage].start
        if first == 0:
            return []
        expected = self.trials.wholes[index].call(self.names[first]).entered
        # A stage without blocks, which sends what it has there
        empty = replace(self.sharding, stages=(*stages[:stage], range(first, first), range(first, len(self.names))))
        sharding = _with_wires(empty, {stage + 1: list(expected)})
        with self.trials.stage_run(index, stage, held, sharding=sharding) as run:
            return [path for path, value in expected.items() if not is_same(run.results.get(path), value)]

    def _proven(self, held: Sequence[set[str]]) -> ModelSharding:
        """The stages with these parameters, compared with the whole."""
        indices, wires = range(len(self.trials.forwards)), [tuple[StageWire, ...]()] * len(held)
        self.trials.forget(0)
        for stage in self._backwards():
            paths = dict.fromkeys(path for index in indices for path in self._wires_into(index, stage, held[stage]))
            wires[stage] = tuple(self._wire(stage, path) for path in paths)
        sharding = replace(self.sharding, wires=tuple(wires[1:]))
        try:
            buffers = compare_stages(self.trials, sharding, held)
        except ProofMismatchError as mismatch:
            self.trials.refuse(str(mismatch))
        return replace(sharding, stage_tensors=self._stage_tensors(held, buffers))

    def _wire(self, stage: int, path: Path) -> StageWire:
        first = self.sharding.stages[stage].start
        calls = [run.call(self.names[first]) for run in self.trials.wholes]
        tensors = [value_at(call.arguments, path) for call in calls]
        later = [self.trials.wholes[0].call(name).arguments for name in self.names[first + 1 :]]
        return StageWire(
            argument=path[0],
            path=path[1:],
            dims=describe_sizes([tensor.shape for tensor in tensors], [each.sizes for each in self.trials.forwards]),
            dtype="compute" if tensors[0].is_floating_point() else str(tensors[0].dtype).removeprefix("torch."),
            needs_gradient=any(tensor.requires_grad for tensor in tensors),
            is_constant=any(tensor is tensors[0] for each in later for _, tensor in tensors_by_path(each)),
            is_written=not torch.equal(tensors[0], calls[0].entered[path]),
        )

    def _stage_tensors(
        self, held: Sequence[set[str]], buffers: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Stages of all tensors that do not follow from the number of a block."""
        stages = {name: tuple(i for i, names in enumerate(held) if name in names) for name in self.parameters}
        stages.update(buffers)
        inventory = inventory_of_module(self.module, {}).tensors
        return {
            tensor.name: wanted
            for tensor in inventory
            if (wanted := stages.get(tensor.name)) and wanted != self.sharding.stages_of(tensor)
        }


def _with_wires(sharding: ModelSharding, wires: Mapping[int, Sequence[Path]]) -> ModelSharding:
    """The same stages with these wires into stages, which need no gradient and may be passed to later blocks."""
    by_border = [
        tuple(
            StageWire(path[0], (), "", path[1:], needs_gradient=False, is_constant=True)
            for path in wires.get(stage, ())
        )
        for stage in range(1, len(sharding.stages))
    ]
    return replace(sharding, wires=tuple(by_border))


def parameters_behind(values: Iterable[object]) -> set[Tensor]:
    """The leaves from which tensors are computed, as autograd knows it."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    leaves, seen = {tensor for tensor in tensors if tensor.is_leaf}, set[object]()
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
            if hasattr(node, "variable"):
                leaves.add(node.variable)
    return leaves
