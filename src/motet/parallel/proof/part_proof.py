"""Comparison of the parts of a module with the whole: tensors that enter and leave borders, results, and gradients.

Runs of a module as the whole and as the part of each rank, one after another in one process.

A part computes with its shares of the split tensors. At a border, where ranks would communicate, it goes on with the
tensor of the whole, or with the rank's piece of it. The graph of autograd ends there, too: a tensor that enters it gets
a random gradient, equal in the whole and all parts; one that leaves it is a leaf whose gradient is compared. So a
difference shows where it arises, and parts that agree with the whole at their borders agree with it everywhere.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from motet.models.arch.mixture.row_tokens import row_exchange
from motet.models.layout_invariant_dropout import RowSplit, row_split
from motet.models.torch_private import InterceptedFunctions
from motet.parallel.model_sharding import (
    BOUNDARY_OPERATIONS,
    LOSS,
    TENSOR_DIMENSION,
    BoundaryComm,
    BoundaryOperation,
    BoundarySide,
    DimensionSplit,
    InputWidth,
)
from motet.parallel.proof.comparison import (
    ProofMismatchError,
    check_close,
    failing_line,
    gradient_comparisons,
    sum_of,
    text_of_failure,
)
from motet.parallel.proof.module_calls import Arguments, CallObserver, output_items, tensors_in, with_output_items
from motet.parallel.proof.proof_values import local_parameters, local_part, local_values
from motet.parallel.tensor_parallel.boundary_hooks import local_input_widths
from motet.parallel.tensor_parallel.sharded_module import split_by_tokens, split_by_units
from motet.parallel.tensor_parallel.split_regions import LocalAttribute
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import shard_embedding

Forward = Callable[[], Any]
Relation = Literal["same", "sum", "piece"]  # Relation of the ranks' tensors to that of the whole
# Tensors of ranks before an operation; for the gradient, before the operation in backward.
BEFORE: Mapping[BoundaryOperation, Relation] = {
    "copy": "same",
    "split": "same",
    "sum": "sum",
    "scatter": "sum",
    "gather": "piece",
    "replicate": "piece",
}
_LEAVES_PIECE = ("scatter", "split")  # After other operations ranks have the same tensor


@dataclass(frozen=True)
class PartProposal:
    """A split of a module over ranks: the tensors of each rank, and the borders where ranks communicate."""

    borders: tuple[BoundaryComm, ...]
    splits: Mapping[str, DimensionSplit] = field(default_factory=dict)  # By the first name of the tensor
    attributes: tuple[LocalAttribute, ...] = ()
    input_widths: tuple[InputWidth, ...] = ()
    added_once: tuple[str, ...] = ()  # Tensors that are zero on ranks but the first, such as biases of row layers
    lookups: Mapping[str, str] = field(default_factory=dict)  # Modules that look up rows of a split table -> its name
    # Modules whose calls begin a part of the computation in which activations are split -> their width, and its split
    inner: Mapping[str, tuple[int, DimensionSplit]] = field(default_factory=dict)
    differentiates_inputs: bool = True  # The graph goes on before a copied input; or it begins there
    adds_results: bool = False  # Results of parts are parts of a sum, such as losses of different tokens


class Site(NamedTuple):
    """A place where ranks communicate, in one forward."""

    module: str
    side: BoundarySide
    argument: int | str
    call: int  # Number of the module's call, counted from 0

    @property
    def noun(self) -> str:
        return f"the {self.side} of {self.module}"


# Functions that make code depend on values, so that parts may take another branch than the whole for some inputs.
_COMPARISONS = {"gt", "__gt__", "ge", "__ge__", "lt", "__lt__", "le", "__le__", "eq", "__eq__", "ne", "__ne__", "sign"}
_COMPARISONS |= {"argmax", "argmin", "argsort", "sort", "topk"}
_COMPARISONS |= {"__bool__", "__float__", "__int__", "__index__", "item", "tolist"}


class _ForwardStoppedError(Exception):
    """All borders that are compared have been passed."""


class PartRun(CallObserver):
    """A forward and backward of the whole module, or of the part of one rank."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        proposal: PartProposal,
        *,
        ranks: int,
        rank: int | None = None,
        reference: "PartRun | None" = None,
        rows: int = 1,
    ) -> None:
        super().__init__(modules)
        self._rows, self._lengths = rows, set[int]()  # Rows of a batch; lengths of split whole sequences
        self.proposal, self.ranks, self.rank, self.reference = proposal, ranks, rank, reference
        self.values: dict[Site, Tensor] = {}  # Tensors that enter borders
        self.comms: dict[Site, BoundaryComm] = {}
        self.gradients: dict[Site | str, Tensor] = {}  # Gradients of tensors that leave borders, or by name
        self.results: list[Tensor] = []  # Results of a forward that was not stopped
        self.passed = ""  # The module of the last border
        self.lies = "same"  # How activations lie now, as in BOUNDARY_OPERATIONS
        self.comms_at: dict[tuple[str, BoundarySide], list[BoundaryComm]] = {}
        for comm in proposal.borders:
            for name in (comm.module, *comm.shared_by):
                self.comms_at.setdefault((name, comm.side), []).append(comm)
        self._shared: dict[BoundaryComm, tuple[Tensor, Tensor]] = {}  # Communicated tensors, and the results
        self._roots: list[tuple[Tensor, Tensor]] = []  # Tensors that enter borders, and their gradients
        self._leaves: dict[Site | str, Tensor] = {}
        self._outputs, self._stop_after = 0, 0
        self._sites: Counter[tuple[str, str, int | str]] = Counter()
        self._compared: list[Tensor] = []
        self.row_parts = list[Sequence[Tensor]]()  # Tensors of which code needs complete rows, by call

    def run(self, forward: Forward, parameters: Callable[[], Mapping[str, Tensor]], *, stop_after: int = 0) -> None:
        """Run the forward, and compute all gradients; `stop_after` is a number of outputs, 0 for the end.

        Called inside of the part's values; `parameters` are differentiated.
        """
        try:
            with self.hooked(), InterceptedFunctions(self._call_function):
                self._stop_after = stop_after
                self._finish(tensors_in(forward()))
        except _ForwardStoppedError:
            pass
        self._shared.clear()
        self._run_backward({name: p for name, p in parameters().items() if p.requires_grad})

    def _call_function(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__name__", "") in _COMPARISONS:
            for tensor in args:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    self._compare(tensor.detach())
        return function(*args, **kwargs)

    def _compare(self, tensor: Tensor) -> None:
        """Refuse a comparison of a tensor that has its shape in the whole, but other values: a sum over a part."""
        problem, index = "a branch or comparison depends on values that a shard does not have", len(self._compared)
        self._compared.append(tensor)
        if self.reference is None:
            return
        expected = self.reference._compared
        if index >= len(expected):
            raise ProofMismatchError(problem, progress=3)
        if expected[index].shape == tensor.shape:
            check_close(tensor, expected[index], problem, progress=3)

    @property
    def has_split_result(self) -> bool:
        """Whether the head has run, whose logits stay on the ranks of their entries."""
        return any(comm.argument == LOSS and self.counts[comm.module] for comm in self.proposal.borders)

    def _finish(self, results: list[Tensor]) -> None:
        self.results = [result.detach() for result in results]
        expected = self.reference.results if self.reference else self.results
        shapes = [self.piece_of_result(each).shape for each in expected]
        if [result.shape for result in results] != shapes:
            sizes = [list(result.shape) for result in results]
            raise ProofMismatchError(f"the module's result has another shape on a shard: {sizes}", progress=4)
        for index, (result, whole_result) in enumerate(zip(results, expected, strict=True)):
            if result.requires_grad:
                gradient = self.piece_of_result(random_like(whole_result, f"result {index}"))
                self._roots.append((result, gradient))

    def piece_of_result(self, expected: Tensor) -> Tensor:
        """Return the rank's part of a result of the whole: the logits of its entries, if no gather follows the head."""
        return self.piece(expected, -1) if self.has_split_result else expected

    def _run_backward(self, parameters: Mapping[str, Tensor]) -> None:
        inputs = dict(self._leaves)
        inputs.update(parameters)
        if self._roots and inputs:
            roots, gradients = zip(*self._roots, strict=True)
            computed = torch.autograd.grad(roots, [*inputs.values()], gradients, allow_unused=True)
            self.gradients = {key: grad for key, grad in zip(inputs, computed, strict=True) if grad is not None}
        self._roots, self._leaves = [], {}

    # --- borders -----------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self) -> Iterator["PartRun"]:
        """Inside, borders communicate, and dropout draws the masks of this rank."""
        token, rows = row_split.set(None), row_exchange.set(self)
        try:
            with super().hooked():
                yield self
        finally:
            row_split.reset(token)
            row_exchange.reset(rows)

    def enter(self, name: str, arguments: Arguments) -> Arguments:
        for comm in self.comms_at.get((name, "input"), ()):
            self._pass_input(comm, name, arguments)
        return arguments

    def _pass_input(self, comm: BoundaryComm, name: str, arguments: Arguments) -> None:
        sent, received = self._shared.get(comm, (None, None))
        readable = [key for key, x in arguments.items() if x is not None and (x is sent or x is received)]
        if name in comm.shared_by and readable:
            arguments[readable[0]] = received
            return
        x = arguments[comm.argument]
        arguments[comm.argument] = self.communicate(comm, name, x)
        self._shared[comm] = x, arguments[comm.argument]
        self.set_layout(comm, name)

    def leave(self, name: str, arguments: Arguments, output: Any) -> Any:
        comms = self.comms_at.get((name, "output"), ())
        if not comms:
            return output
        outputs = output_items(output)
        for comm in comms:
            if comm.argument != LOSS:
                index = comm.argument
                outputs[index] = self.communicate(comm, name, outputs[index])
            self.set_layout(comm, name)
        self._outputs += 1
        if self._outputs == self._stop_after:
            raise _ForwardStoppedError
        return with_output_items(output, outputs)

    def set_layout(self, comm: BoundaryComm, name: str) -> None:
        """Note how activations lie after a border, also for dropout."""
        self.lies = BOUNDARY_OPERATIONS[comm.operation, comm.side][1]
        row_split.set(None if self.rank is None else self.row_split(name, self.rank))

    def row_split(self, name: str, rank: int) -> RowSplit | None:
        """The part of a row that this rank has after the border of a module."""
        if self.lies == "split":
            return split_by_tokens(self.ranks, rank)
        if self.lies == "same" or name not in self.proposal.inner:
            return None
        width, split = self.proposal.inner[name]
        return split_by_units(width, *split.local_spans(width, ranks=self.ranks, index=rank))

    def communicate(self, comm: BoundaryComm, name: str, x: Tensor) -> Tensor:
        """Return the tensor that leaves a border in place of the one that enters it."""
        place = name, comm.side, comm.argument
        site = Site(*place, self._sites[place])
        self._sites[place] += 1
        self.passed = name
        self.note_length(comm, x)
        self.values[site], self.comms[site] = x.detach(), comm
        expected = self.values[site] if self.reference is None else self._expected(site, self.reference)
        if x.requires_grad and (comm.operation != "copy" or self.proposal.differentiates_inputs):
            # The gradient that leaves the operation in backward
            gradient, is_piece = random_like(expected, repr(site)), comm.conjugate in _LEAVES_PIECE
            self._roots.append((x, self.piece(gradient, comm.dim) if is_piece else self.arrange(gradient, comm.dim)))
        after = self.piece(expected, comm.dim) if comm.operation in _LEAVES_PIECE else self.arrange(expected, comm.dim)
        if not x.requires_grad and (comm.side == "output" or self.proposal.differentiates_inputs):
            return after.clone()
        self._leaves[site] = after.detach().requires_grad_()
        return self._leaves[site].clone()  # Not a leaf, into which the module could not write

    def _expected(self, site: Site, reference: "PartRun") -> Tensor:
        """The tensor that enters the border in the whole."""
        expected, x, comm = reference.values.get(site), self.values[site], self.comms[site]
        is_piece = BEFORE[comm.operation] == "piece"
        shape = None if expected is None else (self.piece(expected, comm.dim) if is_piece else expected).shape
        if expected is None or shape != x.shape:
            sizes = f"{list(x.shape)} in place of {None if shape is None else list(shape)}"
            problem = f"{site.noun} has another shape on a shard: {sizes}"
            raise ProofMismatchError(problem, module=site.module, tensor=site.side, progress=1)
        return expected

    def on_whole_rows(self, compute: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """A result that depends on tokens that other ranks have: a part takes these from the run of the whole."""
        complete = self.complete_rows(len(self.row_parts))
        self.row_parts.append(parts)
        if complete is None or parts[0].shape == complete[0].shape:
            return compute(*parts)
        for part, expected in zip(parts, complete, strict=True):
            name = self.running[-1] if self.running else ""
            check_close(part, self.piece(expected, 1), f"{name} gets other tokens on a part than in the whole")
        return self.piece(compute(*complete), 1)

    def complete_rows(self, index: int) -> Sequence[Tensor] | None:
        """The tensors of the whole in one call of `on_whole_rows`; None in a run of the whole."""
        return self.reference.row_parts[index] if self.reference else None

    def piece(self, x: Tensor, dim: int) -> Tensor:
        """This rank's piece of a tensor of the whole, with its padding."""
        if self.rank is None:
            return x
        return local_part(
            self.arrange(x, dim), DimensionSplit(dim, TENSOR_DIMENSION), ranks=self.ranks, index=self.rank
        )

    def without_padding(self, part: Tensor, expected: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Cut the padding off a part, and off the piece of the whole with which it is compared."""
        assert self.rank is not None
        split = DimensionSplit(dim, TENSOR_DIMENSION)
        _, padding = split.local_spans(expected.shape[dim], ranks=self.ranks, index=self.rank)

        def cut(x: Tensor) -> Tensor:
            return x.narrow(dim, 0, x.shape[dim] - padding)

        return cut(part), cut(self.piece(expected, dim))

    def note_length(self, comm: BoundaryComm, x: Tensor) -> None:
        """Note the length of sequences where their split begins."""
        if (comm.operation, comm.side) == ("split", "input") and comm.dim >= 0:
            self._lengths.add(x.shape[comm.dim])

    def arrange(self, x: Tensor, dim: int) -> Tensor:
        """A tensor of the whole in the order in which ranks have it when they join their pieces: where rows and tokens
        are one dimension, tokens are in another order."""
        if self.rank is None or dim or self._rows == 1 or x.shape[0] not in {self._rows * n for n in self._lengths}:
            return x
        pieces: Tensor = x.unflatten(0, (self._rows, self.ranks, -1)).transpose(0, 1)
        return pieces.flatten(0, 2)


def random_like(tensor: Tensor, name: str) -> Tensor:
    """Random values in the shape of a tensor, equal for equal names."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


@contextmanager
def explain_failing_part(run: PartRun, part: str = "a shard") -> Iterator[None]:
    """Turn errors of a module inside of a run into a ProofMismatchError that names its line."""
    try:
        yield
    except ProofMismatchError as error:
        error.module = error.module or run.passed
        raise
    except Exception as error:  # a module may raise anything when its tensors have other shapes
        line = failing_line(error)
        where = f" at {line.place}, in `{line.text}`" if line else ""
        problem = f"the forward of {part} fails{where} ({text_of_failure(error)})"
        raise ProofMismatchError(problem, module=run.passed, line=line) from error


@dataclass
class PartProof:
    """A module with forwards of several sizes. Ways to split it are compared with the whole."""

    module: nn.Module
    forwards: Sequence[Forward]
    ranks: int
    repeatable: Callable[[], AbstractContextManager[object]]  # Inside, a forward draws the same random numbers
    rows: int = 1  # Rows of a batch, where sequences are split
    _whole_runs: dict[object, PartRun] = field(default_factory=dict)
    _used_sites: set[Site] = field(default_factory=set)  # Sites with outputs that the last comparison's results need

    def compare(self, proposal: PartProposal, stop_after: Sequence[int] = ()) -> frozenset[str]:
        """The names of whole parameters whose gradients are partial sums; raises ProofMismatchError.

        `stop_after` are numbers of outputs of borders, after which each forward ends.
        """
        return self._partial_names(self.partial_sums(proposal, stop_after), proposal)

    def partial_sums(self, proposal: PartProposal, stop_after: Sequence[int] = ()) -> dict[str, bool]:
        """Whether the gradients of each whole parameter that has any are partial sums; raises ProofMismatchError."""
        is_partial = dict[str, bool]()
        self._used_sites.clear()
        for index in range(len(self.forwards)):
            forward_sums = self._compare_forward(index, proposal, stop_after[index] if stop_after else 0)
            for name, value in forward_sums.items():
                if is_partial.setdefault(name, value) != value:
                    problem = f"the gradient of {name} is a part of a sum at one length alone"
                    raise ProofMismatchError(problem, tensor=name, progress=6)
        return is_partial

    def _compare_forward(self, index: int, proposal: PartProposal, stop_after: int) -> dict[str, bool]:
        key = index, stop_after, proposal.borders
        reference = self._whole_runs.get(key) or self._run(index, proposal, stop_after=stop_after)
        if stop_after:  # Other proposals with these borders follow, and a short run keeps little
            self._whole_runs[key] = reference
        self._used_sites |= {site for site in reference.gradients if isinstance(site, Site)}
        run_part = partial(self._run, index, proposal, stop_after=stop_after, reference=reference)
        runs = [run_part(rank=rank) for rank in range(self.ranks)]
        compare_values(runs, reference)
        compare_results(runs, reference)
        return self._compare_gradients(runs, reference, proposal)

    def has_gradient(self, module: str) -> bool:
        """Whether results of the last comparison depend on the tensor that a module reads at a border."""
        return any((site.module, site.side) == (module, "input") for site in self._used_sites)

    def forget(self) -> None:
        """Drop the kept runs of the whole."""
        self._whole_runs.clear()

    def _run(
        self,
        index: int,
        proposal: PartProposal,
        *,
        stop_after: int,
        rank: int | None = None,
        reference: PartRun | None = None,
    ) -> PartRun:
        names = dict.fromkeys(name for comm in proposal.borders for name in (comm.module, *comm.shared_by))
        modules = {name: self.module.get_submodule(name) for name in names}

        def forward() -> Any:  # The hooks of widths come after those of borders
            with local_input_widths(self.module, () if rank is None else proposal.input_widths):
                return self.forwards[index]()

        run = PartRun(modules, proposal, ranks=self.ranks, rank=rank, reference=reference, rows=self.rows)
        with explain_failing_part(run), self.repeatable(), self._local_values(proposal, rank):
            run.run(forward, lambda: dict(self.module.named_parameters()), stop_after=stop_after)
        return run

    @contextmanager
    def _local_values(self, proposal: PartProposal, rank: int | None) -> Iterator[None]:
        if rank is None:
            yield
            return
        local = local_parameters(self.module, proposal.splits, ranks=self.ranks, index=rank)
        for name, parameter in self.module.named_parameters() if rank else ():
            if name in proposal.added_once:
                local[name] = nn.Parameter(torch.zeros_like(parameter), requires_grad=parameter.requires_grad)
        with ExitStack() as stack:
            for name, table in proposal.lookups.items():
                entries = self.module.get_parameter(table).shape[0]
                ((start, stop),), _ = proposal.splits[table].local_spans(entries, ranks=self.ranks, index=rank)
                stack.callback(shard_embedding(self.module.get_submodule(name), range(start, stop)))
            with local_values(self.module, local, proposal.attributes):
                yield

    def _compare_gradients(
        self, runs: Sequence[PartRun], reference: PartRun, proposal: PartProposal
    ) -> dict[str, bool]:
        """Check all gradients; whole parameters that have any -> whether ranks have parts of its sum."""
        compare_border_gradients(runs, reference)
        parameter_gradients = {name: grad for name, grad in reference.gradients.items() if isinstance(name, str)}
        is_partial = dict[str, bool]()
        for each in gradient_comparisons(self.module, parameter_gradients):
            gradients = [run.gradients.get(each.name) for run in runs]
            if each.name in proposal.splits:
                each.check_parts(gradients, proposal.splits[each.name])
            elif (value := each.has_partial_sums(gradients)) is not None:
                is_partial[each.name] = value
        return is_partial

    def _partial_names(self, is_partial: Mapping[str, bool], proposal: PartProposal) -> frozenset[str]:
        """Names of parameters with partial sums, and of tensors without gradients in blocks that are alike."""
        parameters = dict(self.module.named_parameters())
        added = {parameters[name].data_ptr() for name, value in is_partial.items() if value}
        without = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        alike = {name for name in without - proposal.splits.keys() if parameters[name].data_ptr() in added}
        return frozenset({name for name, value in is_partial.items() if value} | alike)


def compare_values(runs: Sequence[PartRun], reference: PartRun) -> None:
    """Check the tensors that enter the borders of parts."""
    for site, expected in reference.values.items():
        comm, check = reference.comms[site], partial(check_close, module=site.module, tensor=site.side)
        if any(site not in run.values for run in runs):
            raise ProofMismatchError(f"{site.module} is not called on every shard", module=site.module, progress=1)
        if BEFORE[comm.operation] == "sum":
            problem = f"the outputs of the shards of {site.module} do not add up to its output"
            whole_value = runs[0].arrange(expected, comm.dim)
            check(sum_of(run.values[site] for run in runs), whole_value, problem, progress=3)
            continue
        for run in runs:
            part, whole_value = run.values[site], run.arrange(expected, comm.dim)
            if BEFORE[comm.operation] == "piece":
                part, whole_value = run.without_padding(part, expected, comm.dim)
            check(part, whole_value, f"{site.noun} differs on a shard", progress=2)


def compare_results(runs: Sequence[PartRun], reference: PartRun) -> None:
    """Check the results of parts, or their sums."""
    if reference.proposal.adds_results:
        for index, expected in enumerate(reference.results):
            total = sum_of(run.results[index] for run in runs)
            check_close(total, expected, "the losses of parts do not add up to that of the whole", progress=4)
        return
    for run in runs:
        for result, expected in zip(run.results, reference.results, strict=True):
            problem, parts = "the module's result depends on something that a shard changes", (result, expected)
            if run.has_split_result:
                problem = "the logits depend on the vocabulary of other ranks, or on something that a shard changes"
                parts = run.without_padding(result, expected, -1)
            check_close(*parts, problem, module=run.passed, progress=4)


def compare_border_gradients(runs: Sequence[PartRun], reference: PartRun) -> None:
    """Check the gradients of the tensors that leave the borders of parts."""
    for site, expected in reference.gradients.items():
        if not isinstance(site, Site):
            continue
        comm, tensor = reference.comms[site], f"gradient of {site.side}"
        check = partial(check_close, module=site.module, tensor=tensor, progress=5)
        relation = BEFORE[comm.conjugate]
        by_rank = [
            run.piece(expected, comm.dim) if relation == "piece" else run.arrange(expected, comm.dim) for run in runs
        ]
        gradients = [run.gradients.get(site, torch.zeros_like(each)) for run, each in zip(runs, by_rank, strict=True)]
        if relation == "sum":
            check(sum_of(gradients), by_rank[0], f"the gradients of {site.noun} do not add up")
            continue
        for gradient, each in zip(gradients, by_rank, strict=True):
            check(gradient, each, f"the gradient of {site.noun} differs on a shard")
