"""Ways to split regions, as proposals that are compared with the whole module."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from torch import nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, BoundaryComm, DimensionSplit
from motet.parallel.proof.part_proof import PartProof
from motet.parallel.proof.part_run import Forward, PartProposal
from motet.parallel.tensor_parallel.find_regions import CandidateRegion, ObservedForward
from motet.parallel.tensor_parallel.split_proposals import SplitProposal
from motet.parallel.tensor_parallel.split_regions import SplitRegion


class SplitTrials:
    """A module with its forwards, and what was observed of each; ways to split it are compared with the whole."""

    def __init__(
        self,
        module: nn.Module,
        forwards: Sequence[tuple[Forward, ObservedForward]],
        degree: int,
        *,
        repeatable: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.module, self.degree, self.observed = module, degree, [observed for _, observed in forwards]
        self._proof = PartProof(module, [forward for forward, _ in forwards], degree, repeatable)

    def compare(self, proposals: Sequence[SplitProposal], *, stops: bool) -> frozenset[str]:
        """The names of whole parameters whose gradients are partial sums; raises ProofMismatchError.

        With `stops`, forwards end at the last row layer, and what comes before the regions is not differentiated.
        """
        rows = [row for proposal in proposals for row in proposal.region.rows]
        proposal = PartProposal(
            borders=tuple(comm for each in proposals for comm in region_comms(each.region)),
            splits={name: split for each in proposals for name, split in each.splits.items()},
            attributes=tuple(attribute for each in proposals for attribute in each.attributes),
            added_once=tuple(f"{row}.bias" for row in rows),
            inner={name: split for each in proposals for name, split in self._inner_splits(each)},
            differentiates_inputs=not stops,
        )
        stop_after = [sum(observed.called[row] for row in rows) for observed in self.observed] if stops else ()
        return self._proof.compare(proposal, stop_after) if proposals else frozenset()

    def forget(self) -> None:
        """Drop what is kept of runs of the whole."""
        self._proof.forget()

    def _inner_splits(self, proposal: SplitProposal) -> Iterator[tuple[str, tuple[int, DimensionSplit]]]:
        """How activations are split between a column layer and the next row layer: (its name, (width, split))."""
        observed, region = self.observed[0], proposal.region
        order = [call.layer for call in observed.calls]
        for column in (name for group in region.columns for name in group):
            row = next(name for name in order[order.index(column) :] if name in region.rows)
            yield column, (observed.layers[row].in_width, proposal.input_splits[row])


def region_comms(region: CandidateRegion | SplitRegion) -> Iterator[BoundaryComm]:
    """The communication of a region that reads and returns activations which every rank has."""
    for first, *others in region.columns:
        yield BoundaryComm(first, "input", 0, "copy", TENSOR_DIMENSION, shared_by=tuple(others))
    for row in region.rows:
        if not region.columns:
            yield BoundaryComm(row, "input", 0, "split", TENSOR_DIMENSION)
        yield BoundaryComm(row, "output", 0, "sum", TENSOR_DIMENSION)
