"""Stages of any module, proven by running them one after another in one process against the whole module.

A value that a stage needs of others shows as NaN: arguments of its first block are wires, and others are refused.

Runs of a module as the whole and as one stage, in one process, for a proof of its stages.

While a stage runs, every parameter that it does not hold is NaN, and it receives the tensors of the whole.
Before the stages run, from the last to the first, the whole module runs with NaN alone, so that an attribute which a
block leaves for a later one has no value, either.

Comparison of stages with the whole module: sent tensors, the loss, gradients and buffers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.user_module import named_blocks
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.pipeline.stage_wires import BlockOutput, StageWire
from motet.parallel.pipeline.stages.stage_balance import check_stages
from motet.parallel.pipeline.stages.stage_module import PipelineStages, describe_output, describe_sizes
from motet.parallel.process.module_inventory import inventory_of_module, persistent_buffers
from motet.parallel.proof.comparison import ProofMismatchError, gradient_comparisons, is_close, text_of_failure
from motet.parallel.proof.module_calls import ModuleCall, Path, record_calls, tensors_by_path, value_at
from motet.parallel.proof.proof_values import local_values, random_values, replaced_items

LOSS: Path = ("loss",)
is_same = partial(is_close, nan_is_equal=True)


@dataclass(frozen=True)
class SizedForward:
    """A forward of a module to its loss, and the sizes of its micro-batch, such as `rows` and `tokens`."""

    forward: Callable[[], Tensor]
    sizes: Mapping[str, int]


@dataclass
class TrialRun:
    """A forward of the whole module, or of one stage."""

    calls: dict[str, list[ModuleCall]]  # Calls of blocks
    buffers: dict[str, Tensor]  # Buffers after the run
    results: dict[Path, Tensor]  # The loss at LOSS, or a stage's sent tensors, by path in the arguments of a block
    received: dict[Path, Tensor] = field(default_factory=dict)

    def call(self, block: str) -> ModuleCall:
        """The call of a block."""
        return self.calls[block][0]

    def differentiate(self, gradients: Mapping[Path, Tensor | None]) -> dict[Path, Tensor | None]:
        """Add to the gradients of parameters, from these of results; returns those of the received tensors."""
        pairs = [(tensor, gradients.get(path)) for path, tensor in self.results.items() if tensor.requires_grad]
        pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None or LOSS in self.results]
        if pairs:
            tensors, gradients_of_results = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients_of_results, retain_graph=True)
        return {path: tensor.grad for path, tensor in self.received.items()}


class StageTrials:
    """A module with random values in float64, its forwards of several sizes, and a run of each as the whole."""

    def __init__(self, module: nn.Module, forwards: Sequence[SizedForward]) -> None:
        self.module, self.forwards = module, forwards
        self.blocks = named_blocks(module)
        self._dropout = LayoutInvariantDropoutMode(0, module)
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers_before = self._buffers()
        self.wholes = [self._run_whole(index) for index in range(len(forwards))]
        self.names = list(self.wholes[0].calls)  # Names of the blocks, in the order in which they are called
        self._check_calls()

    def _check_calls(self) -> None:
        """Refuse a module whose blocks cannot be divided among stages."""
        self.check(
            self.blocks,
            "it has no list of blocks, which are items of an nn.ModuleList that share no parameters, or of an "
            "nn.Sequential of modules with modules inside",
        )
        self.check(
            self.names, f"a forward calls none of its {len(self.blocks)} blocks, such as {next(iter(self.blocks))}"
        )
        for name, calls in self.wholes[0].calls.items():
            kind = type(self.blocks[name]).__name__
            check_input(
                len(calls) == 1,
                f"layout.pp cannot cut {kind} {name}: a forward calls it several times, and a stage computes a block "
                "once; leave layout.pp out, or give each call another block",
            )
        orders = [list(run.calls) for run in self.wholes]
        self.check(orders.count(self.names) == len(orders), "micro-batches of other sizes call other blocks")
        losses = [run.results[LOSS] for run in self.wholes]
        self.check(all(loss.isfinite().all() for loss in losses), "its loss is not finite with random parameters")
        for name in self.names:
            call = self.wholes[0].call(name)
            self.check(call.left, f"block {name} returns {type(call.output).__name__}, in which no tensor was seen")

    def check(self, is_valid: object, problem: str) -> None:
        """Refuse the model unless it is valid."""
        if not is_valid:
            self.refuse(problem)

    def refuse(self, problem: str) -> NoReturn:
        """Refuse the model."""
        name = type(self.module).__name__
        raise InputError(f"layout.pp cannot cut {name} into stages: {problem}; leave layout.pp out")

    def _run_whole(self, index: int) -> TrialRun:
        with self._inside(index, "as a whole") as calls:
            loss = self.forwards[index].forward()
            return TrialRun(calls, self._buffers(), {LOSS: loss})

    def gradients_of_whole(self, index: int) -> dict[str, Tensor]:
        """The gradients of parameters in the whole, whose forward has run before."""
        with self._inside(index, "as a whole"):
            self.wholes[index].differentiate({})
        return self.pop_gradients()

    def pop_gradients(self) -> dict[str, Tensor]:
        """Remove and return the gradients of parameters."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad()
        return gradients

    def expected_after(self, index: int, blocks: range) -> Mapping[Path, Tensor]:
        """The arguments of the block after these in the whole, or its loss."""
        run = self.wholes[index]
        return run.results if blocks.stop == len(self.names) else run.call(self.names[blocks.stop]).entered

    def forget(self, index: int) -> None:
        """Put NaN into the attributes that a forward writes."""
        forward = self.forwards[index].forward
        # With NaN as values a module may fail in any way, after it wrote the attributes that it can
        with self._without(()), self._repeatable(index), self._copied_buffers(), torch.no_grad(), suppress(Exception):
            forward()

    @contextmanager
    def stage_run(
        self, index: int, stage: int, held: Collection[str], *, sharding: ModelSharding
    ) -> Iterator[TrialRun]:
        """Run one stage, which receives the tensors of the whole; the caller runs a backward inside.

        `held` are its parameters.
        """
        wires_in, wires_out = (((), *sharding.wires, ())[stage + i] for i in (0, 1))
        paths, first = [wire.place for wire in wires_out] or [LOSS], self.names[sharding.stages[stage].start]
        entered = self.wholes[index].call(first).entered
        received = {wire.place: entered[wire.place].clone().requires_grad_(wire.needs_gradient) for wire in wires_in}
        stages = PipelineStages(self.module, sharding)
        try:
            with self._without(held), self._inside(index, f"as a stage from {first} on") as calls:
                sent = stages.run(stage, self.forwards[index].forward, list(received.values()))
                yield TrialRun(calls, self._buffers(), dict(zip(paths, sent, strict=False)), received)
        finally:
            stages.remove()

    @contextmanager
    def _inside(self, index: int, role: str) -> Iterator[dict[str, list[ModuleCall]]]:
        """Record a forward, which can be repeated; refuse the module if it raises something."""
        try:
            with self._repeatable(index), self._copied_buffers(), record_calls(self.blocks) as calls:
                yield calls
        except (InputError, ProofMismatchError):
            raise
        except Exception as error:  # noqa: BLE001  # a module may raise anything, in particular when its tensors are NaN
            self.refuse(f"it fails {role}, in float64 with random parameters ({text_of_failure(error)})")

    def _repeatable(self, index: int) -> AbstractContextManager[object]:
        """Inside, a forward draws the same dropout masks each time, and a backward those of its forward."""
        return self._dropout.for_rows(0, torch.arange(self.forwards[index].sizes["rows"]))

    def _without(self, held: Collection[str]) -> AbstractContextManager[None]:
        """Inside, parameters are NaN unless they are held under one of their names."""
        kept = {self._parameters[name] for name in held}
        missing = {
            name: nn.Parameter(torch.full((), torch.nan, dtype=p.dtype).expand(p.shape), requires_grad=False)
            for name, p in self._parameters.items()
            if p not in kept and p.is_floating_point()
        }
        return local_values(self.module, missing)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in persistent_buffers(self.module).items()}

    def _copied_buffers(self) -> AbstractContextManager[None]:
        """Inside, buffers are copies, so that those of the module keep their values."""
        copies = {buffer: buffer.clone() for buffer in self.module.buffers()}
        parts = [part._buffers for part in self.module.modules()]
        return replaced_items([(of, {name: b if b is None else copies[b] for name, b in of.items()}) for of in parts])


COMPARED = 2  # Forwards in which stages are compared with the whole; further ones show the proportions of sizes


def compare_stages(
    trials: StageTrials, sharding: ModelSharding, held: Sequence[AbstractSet[str]]
) -> dict[str, tuple[int, ...]]:
    """Run each stage forward and backward with the tensors of the whole; raises ProofMismatchError.

    `held` are the parameters of each stage. Returns the stages on which buffers outside of blocks have their values.
    """
    right_buffers = set[tuple[int, str]]()
    for index in range(len(trials.wholes))[:COMPARED]:
        right_buffers |= _compare_forward(trials, sharding, held, index=index)
    return _stages_of_buffers(trials, sharding.stages, right_buffers)


def _compare_forward(
    trials: StageTrials, sharding: ModelSharding, held: Sequence[AbstractSet[str]], *, index: int
) -> set[tuple[int, str]]:
    """Compare all stages in one forward. Returns (stage, buffer) of each buffer that then equals that of the whole."""
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
    """The reason why a result of a stage of these blocks is wrong."""
    for name in blocks:
        call, expected = run.call(name), reference.call(name)
        if all(is_same(call.left.get(at), value) for at, value in expected.left.items()):
            continue
        wrong = [at for at, value in expected.entered.items() if not is_same(call.entered.get(at), value)]
        if not wrong:
            return f"block {name} reads something that earlier blocks left, and that is not one of its arguments"
        source = f"is computed from earlier blocks than {blocks[0]}, and is not one of its arguments"
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
    block_by_buffer = {id(buffer): i for i, name in enumerate(trials.names) for buffer in trials.blocks[name].buffers()}
    for name, buffer in persistent_buffers(trials.module).items():
        block = block_by_buffer.get(id(buffer))
        wanted = {i for i, blocks in enumerate(stages) if block is None or block in blocks}
        is_changed = not is_same(after[name], before[name])
        holders = {stage for stage in wanted if not is_changed or (stage, name) in right_buffers}
        if not holders:
            problem = f"no stage has the values of buffer {name}, which blocks of several stages change"
            raise ProofMismatchError(problem, tensor=name)
        stages_of |= {} if block is not None else {name: tuple(sorted(holders))}
    return stages_of


def prove_stages(
    module: nn.Module,
    forwards: Sequence[SizedForward],
    stages: Sequence[range] | Callable[[Sequence[str]], Sequence[range]],
    *,
    prepare: Callable[[], object] | None = None,
) -> ModelSharding:
    """The stages of a module, whose parameters may be on the meta device: their tensors, and their wires.

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
        """Find the needs of stages, and compare the stages with the whole."""
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
        """The form of each block's output."""
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
        """The same, without parameters from which an earlier stage computes a tensor that it can send."""
        fewer = [set(names) for names in needed]
        for stage in self._backwards():
            for name in needed[stage].intersection(set().union(*needed[:stage])):
                held = in_blocks[stage] | fewer[stage]
                if self._study(stage, held)[0] <= self._study(stage, held - {name})[0]:
                    fewer[stage].discard(name)
        return fewer

    def _study(self, stage: int, held: set[str]) -> tuple[set[Path], set[str]]:
        """(Paths to the right tensors after a stage; names of parameters outside of blocks that they depend on)."""
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
        # A stage without blocks, which sends the arguments of the first block
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
    """The leaves from which tensors are computed, in autograd's graph."""
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
