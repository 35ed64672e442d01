"""Comparison of the parts of a module with the whole: what enters borders and leaves them, results, and gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from motet.parallel.proof.comparison import (
    ProofMismatchError,
    check_close,
    gradient_comparisons,
    sum_of,
    text_of_failure,
)
from motet.parallel.proof.part_run import BEFORE, Forward, PartProposal, PartRun, Site
from motet.parallel.proof.proof_values import local_parameters, local_values
from motet.parallel.proof.source_lines import failing_line
from motet.parallel.tensor_parallel.input_widths import local_input_widths
from motet.parallel.tensor_parallel.vocabulary.rank_vocabulary import shard_embedding


@dataclass
class PartProof:
    """A module with forwards of several sizes. Ways to split it are compared with the whole."""

    module: nn.Module
    forwards: Sequence[Forward]
    ranks: int
    repeatable: Callable[[], AbstractContextManager[object]]  # Inside, a forward draws the same random numbers
    rows: int = 1  # Of a batch, where sequences are split
    _whole_runs: dict[object, PartRun] = field(default_factory=dict)
    _used_sites: set[Site] = field(default_factory=set)  # On what leaves them the results of the last comparison depend

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
            of_forward = self._compare_forward(index, proposal, stop_after[index] if stop_after else 0)
            for name, value in of_forward.items():
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
        return self._compare_gradients(runs, reference, proposal)

    def has_gradient(self, module: str) -> bool:
        """Whether results depend on what a module reads at a border, in what was compared last."""
        return any((site.module, site.side) == (module, "input") for site in self._used_sites)

    def forget(self) -> None:
        """Drop what is kept of runs of the whole."""
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
        try:
            with self.repeatable(), self._local_values(proposal, rank):
                run.run(forward, lambda: dict(self.module.named_parameters()), stop_after=stop_after)
        except ProofMismatchError as error:
            error.module = error.module or run.passed
            raise
        except Exception as error:  # a module may raise anything when its tensors have other shapes
            line = failing_line(error)
            where = f" at {line.place}, in `{line.text}`" if line else ""
            problem = f"the forward of a shard fails{where} ({text_of_failure(error)})"
            raise ProofMismatchError(problem, module=run.passed, line=line) from error
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
        of_parameters = {name: grad for name, grad in reference.gradients.items() if isinstance(name, str)}
        is_partial = dict[str, bool]()
        for each in gradient_comparisons(self.module, of_parameters):
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
    """Check what enters the borders of parts, and their results."""
    for site, expected in reference.values.items():
        comm, check = reference.comms[site], partial(check_close, module=site.module, tensor=site.side)
        if any(site not in run.values for run in runs):
            raise ProofMismatchError(f"{site.module} is not called on every shard", module=site.module, progress=1)
        if BEFORE[comm.operation] == "sum":
            problem = f"the outputs of the shards of {site.module} do not add up to its output"
            of_whole = runs[0].arrange(expected, comm.dim)
            check(sum_of(run.values[site] for run in runs), of_whole, problem, progress=3)
            continue
        for run in runs:
            part, of_whole = run.values[site], run.arrange(expected, comm.dim)
            if BEFORE[comm.operation] == "piece":
                part, of_whole = run.without_padding(part, expected, comm.dim)
            check(part, of_whole, f"{site.noun} differs on a shard", progress=2)
    for run in runs:
        for result, expected in zip(run.results, reference.results, strict=True):
            problem, parts = "the module's result depends on something that a shard changes", (result, expected)
            if run.has_split_result:
                problem = "the logits depend on the vocabulary of other ranks, or on something that a shard changes"
                parts = run.without_padding(result, expected, -1)
            check_close(*parts, problem, module=run.passed, progress=4)


def compare_border_gradients(runs: Sequence[PartRun], reference: PartRun) -> None:
    """Check the gradients of what leaves the borders of parts."""
    for site, expected in reference.gradients.items():
        if not isinstance(site, Site):
            continue
        comm, tensor = reference.comms[site], f"gradient of {site.side}"
        check = partial(check_close, module=site.module, tensor=tensor, progress=5)
        relation = BEFORE[comm.conjugate]
        of_ranks = [
            run.piece(expected, comm.dim) if relation == "piece" else run.arrange(expected, comm.dim) for run in runs
        ]
        gradients = [run.gradients.get(site, torch.zeros_like(each)) for run, each in zip(runs, of_ranks, strict=True)]
        if relation == "sum":
            check(sum_of(gradients), of_ranks[0], f"the gradients of {site.noun} do not add up")
            continue
        for gradient, each in zip(gradients, of_ranks, strict=True):
            check(gradient, each, f"the gradient of {site.noun} differs on a shard")
