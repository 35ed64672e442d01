"""Splits of the linear layers of any module, proposed from shapes and plans and proven by running the shards.

Everything runs in one process, on the CPU and in float64, with random parameters. Layers without a proof stay whole.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import nn

from motet.core.errors import check_input
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.user_module import named_blocks
from motet.parallel.model_sharding import TENSOR_DIMENSION, ShardRule
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.proof.part_proof import Forward, PartProof
from motet.parallel.proof.proof_values import random_values
from motet.parallel.tensor_parallel.split_proposals import (
    CandidateRegion,
    ObservedForward,
    RegionFacts,
    SplitProposal,
    advice_on_numbers,
    candidate_regions,
    declared_copies,
    declared_roles,
    is_inside,
    join_proposals,
    modules_bottom_up,
    observe_forward,
    propose_jointly,
    propose_splits,
    split_row_input,
    structure,
)
from motet.parallel.tensor_parallel.split_regions import (
    RULE_OF_JOB,
    LayerSplit,
    ProvenSplits,
    SplitRegion,
    WholeRegion,
    splits_by_rule,
)

MOST_TRIES = 120  # Ways to split one region


def prove_splits(
    module: nn.Module,
    forwards: Sequence[Forward],
    degree: int,
    *,
    overrides: Mapping[str, LayerSplit] | None = None,
    plan: Mapping[str, str] | None = None,
    excluded: Collection[str] = (),
    rows: int = 1,
) -> ProvenSplits:
    """The regions of a module that can be split over `degree` ranks, and the modules that stay whole.

    Each of `forwards` runs the module with a batch of `rows` rows; they differ in length. Names of `overrides` and
    `plan` may have wildcards; an override that cannot be proven is an InputError. Layers that are `excluded` are left
    alone, such as the embedding and the head, which are split over the vocabulary.
    """
    with random_values(module):
        dropout = LayoutInvariantDropoutMode(0, module)
        repeatable = partial(dropout.for_rows, 0, torch.arange(rows))
        observations = list[ObservedForward]()
        for forward in forwards:
            with repeatable():
                observations.append(observe_forward(module, forward))
        proof = PartProof(module, forwards, degree, repeatable)
        forced = _forced_splits(overrides or {}, module, {*observations[0].layers} - {*excluded})
        return _SplitSearch(proof, observations, forced, declared_roles(module, plan), set(excluded)).prove()


def _forced_splits(
    overrides: Mapping[str, LayerSplit], module: nn.Module, layers: Collection[str]
) -> dict[str, LayerSplit]:
    """The splits of linear layers that the job demands; a rule that keeps another layer whole has no effect here."""
    forced = splits_by_rule(overrides, [name for name, part in module.named_modules() if part._parameters])
    for glob, split in overrides.items():
        names = splits_by_rule({glob: split}, forced)
        problem = f"layout.rules: {min(names)} cannot be split by {split}: its forward is not that of a linear layer"
        check_input(split == "whole" or not names.keys().isdisjoint(layers), problem)
    return {name: split for name, split in forced.items() if name in layers}


@dataclass
class _SplitSearch:
    """The search for regions, from the innermost modules outwards."""

    proof: PartProof
    observations: Sequence[ObservedForward]  # One for each forward
    forced: Mapping[str, LayerSplit]
    declared: Mapping[str, LayerSplit]
    taken: set[str]  # Layers that are in a region, or whole by a rule
    proven: list[SplitProposal] = field(default_factory=list)
    reasons: dict[CandidateRegion, str] = field(default_factory=dict)  # Why a region stays whole
    results: dict[object, SplitProposal | str] = field(default_factory=dict)  # By the structure of the region
    tried_jointly: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.module, self.observed = self.proof.module, self.observations[0]
        named = list(self.module.named_parameters(remove_duplicate=False))
        counts = Counter(id(parameter) for _, parameter in named)
        self.names = frozenset(name for name, _ in named)
        self.aliased = frozenset(name for name, parameter in named if counts[id(parameter)] > 1)
        self.blocks, self.copies = list(named_blocks(self.module)), declared_copies(self.module)
        layers = self.observed.layers
        self.block_of = {layer: block for layer in layers for block in self.blocks if is_inside(layer, block)}
        self.taken |= {name for name, role in self.forced.items() if role == "whole"}

    def prove(self) -> ProvenSplits:
        """The whole search."""
        for name in modules_bottom_up(self.module):
            self._search_module(name)
        for name in modules_bottom_up(self.module):
            if self.observed.called[name] and not any(is_inside(name, block) for block in self.blocks):
                self._search_jointly(name)
        for name, role in self.forced.items():
            if name not in self.taken:
                self._prove_forced(name, role)
        partial_names = self._check_all()
        return self._outcome(partial_names)

    def _search_module(self, name: str) -> None:
        """Prove the regions of layers that are in this module, and in one block or in none."""
        hidden = {layer for layer, block in self.block_of.items() if block != name and is_inside(block, name)}
        copies = tuple(each for each in self.copies if each.rpartition(".")[0] == name)
        found_here = candidate_regions(self.observed, name, self.taken | hidden)
        regions = [replace(region, copies=copies) for region in found_here]
        for region in sorted(regions, key=self._rank):
            is_known = any((region.columns, region.rows) == (known.columns, known.rows) for known in self.reasons)
            if is_known or not self.taken.isdisjoint(self._between(region)) or not self._is_allowed(region):
                continue
            result = self._result(region)
            if isinstance(result, str):
                self.reasons[region] = result
            else:
                self._accept(result)

    def _between(self, region: CandidateRegion) -> set[str]:
        """The layers that are called from the first to the last layer of a region."""
        order = [call.layer for call in self.observed.calls]
        places = [order.index(layer) for layer in region.layers]
        return set(order[min(places) : max(places) + 1])

    def _rank(self, region: CandidateRegion) -> tuple[bool, bool, int, int]:
        """Declared regions come first; then regions whose output is as wide as their input; then large layers."""
        layers = [self.observed.layers[name] for name in region.layers]
        changes_width = layers[-1].out_width != layers[0].in_width
        elements = sum(layer.in_width * layer.out_width for layer in layers)
        return not self._is_declared(region), changes_width, len(region.columns), -elements

    def _is_declared(self, region: CandidateRegion) -> bool:
        columns = [name for group in region.columns for name in group]
        return all(self.declared.get(name) == "columns" for name in columns) and all(
            self.declared.get(name) == "rows" for name in region.rows
        )

    def _is_allowed(self, region: CandidateRegion) -> bool:
        columns = [name for group in region.columns for name in group]
        return not any(self.forced.get(name) == "rows" for name in columns) and not any(
            self.forced.get(name) == "columns" for name in region.rows
        )

    def _accept(self, proposal: SplitProposal) -> None:
        self.proven.append(proposal)
        self.taken.update(proposal.region.layers)

    def _result(self, region: CandidateRegion) -> SplitProposal | str:
        """The proven split of a region, or the reason why it has none; taken from an earlier region that is alike."""
        start = len(region.module) + 1 if region.module else 0
        relative = tuple(tuple(name[start:] for name in group) for group in (*region.columns, region.rows))
        key = structure(self.module.get_submodule(region.module)), relative
        if key not in self.results:
            self.results[key] = self._prove_region(region)
        result = self.results[key]
        return result if isinstance(result, str) else _moved(result, region)

    def _facts(self, region: CandidateRegion) -> RegionFacts:
        return RegionFacts(self.module, self.observed, region, self.proof.ranks, self.aliased)

    def _prove_region(self, region: CandidateRegion) -> SplitProposal | str:
        if tied := self._tied_tensors(region):
            return f"{min(tied)} is also a parameter of another module"
        self.proof.forget()
        problems, mismatches, is_likely, facts = list[str](), list[ProofMismatchError](), True, self._facts(region)
        advice = ""
        for proposal in islice(propose_splits(facts, problems), MOST_TRIES):
            is_likely = is_likely and (bool(mismatches) or not problems)  # No likelier one is impossible
            mismatch = self._compare([proposal])
            if not isinstance(mismatch, ProofMismatchError):
                return self._with_spare(proposal)
            mismatches.append(mismatch)
            if mismatch.line and not advice:
                advice = advice_on_numbers(mismatch.line, proposal, facts)
        furthest = max(mismatches, key=lambda each: each.progress, default=None)
        if furthest is None or (problems and not is_likely):
            return problems[0]
        columns = ", ".join(name for group in region.columns for name in group)
        if advice:
            furthest = next(mismatch for mismatch in mismatches if mismatch.line)
        text = f"with {columns} split by columns and {region.rows[0]} by rows, {furthest}"
        if furthest.progress > mismatches[0].progress:
            text += f"; without other changes, {mismatches[0]}"
        text += f"{advice} ({len(mismatches)} ways were tried)"
        return text.replace(f"{region.module}.", "") if region.module else text

    def _tied_tensors(self, region: CandidateRegion) -> list[str]:
        return [name for name in self.aliased if name.rpartition(".")[0] in region.layers]

    def _with_spare(self, proposal: SplitProposal) -> SplitProposal:
        """The proposal with the numbers of heads that other forwards may read, unless something depends on them."""
        changed = replace(proposal, attributes=(*proposal.attributes, *proposal.spare))
        is_wrong = proposal.spare and isinstance(self._compare([changed]), ProofMismatchError)
        return replace(proposal, spare=()) if is_wrong else changed

    def _compare(
        self, proposals: Sequence[SplitProposal], *, stops: bool = True
    ) -> frozenset[str] | ProofMismatchError:
        """The names of whole parameters whose gradients are partial sums, or where shards differ from the whole.

        With `stops`, forwards end at the last row layer, and the computation before the regions is not differentiated.
        """
        rows = [row for each in proposals for row in each.region.rows]
        joined = join_proposals(proposals, self.observed, differentiates_inputs=not stops)
        stop_after = [sum(each.called[row] for row in rows) for each in self.observations] if stops else ()
        try:
            return self.proof.compare(joined, stop_after) if proposals else frozenset()
        except ProofMismatchError as error:
            return error

    def _search_jointly(self, name: str) -> None:
        """Prove regions that need one another, such as attention layers which share a table of relative positions."""
        layers = self.observed.layers
        failed = [
            region
            for region in self.reasons
            if is_inside(region.module, name) and self.taken.isdisjoint(region.layers) and not self._rank(region)[1]
            if not self._tied_tensors(region)
        ]
        for width in {layers[region.rows[0]].in_width for region in failed}:
            regions = {r.rows: r for r in reversed(failed) if layers[r.rows[0]].in_width == width}
            key = frozenset(regions), len(list(self.module.get_submodule(name).parameters()))
            if key in self.tried_jointly:
                continue
            self.tried_jointly.add(key)
            proven = [
                proposal
                for proposal in self.proven
                if is_inside(proposal.region.module, name) and layers[proposal.region.rows[0]].in_width == width
            ]
            members = [self._facts(region) for region in reversed(regions.values())]
            self.proof.forget()
            for proposal in propose_jointly(name, members, proven):
                if not isinstance(self._compare([proposal]), ProofMismatchError):
                    self.proven = [each for each in self.proven if each not in proven]
                    self._accept(self._with_spare(proposal))
                    break

    def _prove_forced(self, name: str, role: LayerSplit) -> None:
        reasons = [reason for region, reason in self.reasons.items() if name in region.layers]
        reason = f": {reasons[0]}" if reasons else ""
        problem = f"layout.rules: {name} cannot be split by {role}"
        check_input(
            role == "rows", f"{problem}{reason or ': no later layer of its module can be split by rows with it'}"
        )
        width, degree = self.observed.layers[name].in_width, self.proof.ranks
        check_input(width % degree == 0, f"{problem}: {degree} ranks cannot read {width} input features evenly")
        proposal = split_row_input(self.module, self.observed.layers[name])
        mismatch = self._compare([proposal])
        check_input(not isinstance(mismatch, ProofMismatchError), f"{problem}: {mismatch}")
        self._accept(proposal)

    def _check_all(self) -> frozenset[str]:
        """Compare the complete forward with all regions split; drop the regions that something else depends on."""
        self.proof.forget()
        candidates, partial_names = self.proven, self._compare(self.proven, stops=False)
        if not isinstance(partial_names, ProofMismatchError):
            return partial_names
        self.proven, partial_names = [], frozenset()
        for key in dict.fromkeys(map(self._kind, candidates)):
            alike = [proposal for proposal in candidates if self._kind(proposal) == key]
            result = self._add_to_proven(alike)
            if isinstance(result, ProofMismatchError):  # Perhaps because of attributes that are spare
                result = self._add_to_proven([_without_spare(proposal) for proposal in alike])
            if not isinstance(result, ProofMismatchError):
                partial_names = result
                continue
            layers = [name for proposal in alike for name in proposal.region.layers]
            forced = [name for name in layers if name in self.forced]
            check_input(not forced, f"layout.rules: {', '.join(forced)} cannot be split: {result}")
            self.reasons.update({proposal.region: str(result) for proposal in alike})
            self.taken.difference_update(layers)
        return partial_names

    def _add_to_proven(self, proposals: Sequence[SplitProposal]) -> frozenset[str] | ProofMismatchError:
        self.proof.forget()
        result = self._compare([*self.proven, *proposals], stops=False)
        if not isinstance(result, ProofMismatchError):
            self.proven += proposals
        return result

    def _kind(self, proposal: SplitProposal) -> object:
        return structure(self.module.get_submodule(proposal.region.module)), len(proposal.region.layers)

    def _outcome(self, partial_names: Collection[str]) -> ProvenSplits:
        regions = [self._region(proposal, partial_names) for proposal in self.proven]
        whole_regions, covered = list[WholeRegion](), set(self.taken)
        for region, reason in self.reasons.items():
            if not covered.issuperset(region.layers) and self.taken.isdisjoint(region.layers):
                whole_regions.append(WholeRegion(region.module, reason))
                covered.update(region.layers)
        covered.update(name.rpartition(".")[0] for region in regions for name in region.rules)
        for name, part in self.module.named_modules():
            dims = max((parameter.dim() for parameter in part._parameters.values() if parameter is not None), default=0)
            if dims >= 2 and name not in covered:
                whole_regions.append(WholeRegion(name, self._why_whole(name, dims)))
        whole_regions += [WholeRegion(n, RULE_OF_JOB) for n, role in self.forced.items() if role == "whole"]
        return ProvenSplits(tuple(regions), tuple(whole_regions))

    def _why_whole(self, name: str, dims: int) -> str:
        if name in self.observed.layers:
            return "no other linear layer of its module can be split with it"
        if not self.observed.called[name]:
            return "the forward does not call it"
        return "its forward is not that of a linear layer" + (f": a weight has {dims} dimensions" if dims > 2 else "")

    def _region(self, proposal: SplitProposal, partial_names: Collection[str]) -> SplitRegion:
        region, complete = proposal.region, ShardRule().partial_over
        found_by = "the model's plan" if self._is_declared(region) else "shapes"
        if any(name in self.forced for name in region.layers):
            found_by = RULE_OF_JOB
        where = f"of {type(self.module.get_submodule(region.module)).__name__}, found by {found_by}"
        rules = {}
        for name, split in proposal.splits.items():
            layer, length = name.rpartition(".")[0], self.module.get_parameter(name).shape[split.dim]
            kind = "rows" if layer in region.rows else "columns" if layer in region.layers else "heads"
            is_shared = not split.parts and length // split.unit < self.proof.ranks
            partial_over = (*complete, TENSOR_DIMENSION) if is_shared else complete
            shared = f" {length // split.unit} of {split.unit} elements that ranks share," if is_shared else ""
            rules[name] = ShardRule((split,), partial_over, f"{kind}{shared} {where}")
        for name in sorted(partial_names):
            if self._innermost(name) == region:
                rules[name] = ShardRule(
                    (), (*complete, TENSOR_DIMENSION), f"whole; each rank uses it for its part {where}"
                )
        for name in (f"{row}.bias" for row in region.rows):
            if name in self.names:
                rules[name] = ShardRule((), complete, f"whole, added once, {where}")
        return SplitRegion(
            region.module, region.readers, region.rows, rules, proposal.attributes, proposal.input_widths, found_by
        )

    def _innermost(self, name: str) -> CandidateRegion:
        """The smallest region that holds a tensor, or the last one if none does."""
        regions = [proposal.region for proposal in self.proven]
        around = [region for region in regions if is_inside(name, region.module)]
        return max(around or regions[-1:], key=lambda region: len(region.module))


def _without_spare(proposal: SplitProposal) -> SplitProposal:
    return replace(proposal, attributes=tuple(each for each in proposal.attributes if each not in proposal.spare))


def _moved(proposal: SplitProposal, region: CandidateRegion) -> SplitProposal:
    """The way to split another region that is alike."""
    start = len(proposal.region.module)

    def move(name: str) -> str:
        return region.module + name[start:]

    return replace(
        proposal,
        region=region,
        splits={move(name): split for name, split in proposal.splits.items()},
        attributes=tuple((move(path), name, value) for path, name, value in proposal.attributes),
        spare=tuple((move(path), name, value) for path, name, value in proposal.spare),
        input_widths=tuple(
            replace(each, module=move(each.module), readers=tuple(map(move, each.readers)))
            for each in proposal.input_widths
        ),
        input_splits={move(name): split for name, split in proposal.input_splits.items()},
    )
