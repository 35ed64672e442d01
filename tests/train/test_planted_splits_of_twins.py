"""Mistakes in a split are refused on the smaller twin as they are on the model itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from motet.models.build import TrainableModel, build_trainable_model
from motet.parallel.model_sharding import DimensionSplit
from motet.parallel.proof.comparison import ProofMismatchError
from motet.parallel.tensor_parallel import split_proof
from motet.parallel.tensor_parallel.split_proposals import SplitProposal
from motet.train.job import Job, load_job
from motet.train.launch.preflight import check_job
from motet.train.proof import proposed_sharding
from motet.train.proof.proposed_sharding import RandomBatches
from train.test_twin_of_job import _COMMON, _family_job, _layout_words

Proposals = list[SplitProposal]
Mistake = Callable[[Proposals, nn.Module], Proposals]
_OWN = (
    "family='decoder', heads=8, kv_heads=4, hidden=192, ffn_hidden=208, layers=4, vocab_size=1000, tied=false, "
    "bias=true, qkv_bias=true, query_key_norm=true, context=64"
)


def _tensor(ending: str, change: Callable[[DimensionSplit, int], DimensionSplit | None]) -> Mistake:
    """Another split, or none, of the tensors whose names end so; it may depend on the length of the dimension."""

    def apply(proposals: Proposals, module: nn.Module) -> Proposals:
        changed = []
        for each in proposals:
            splits = dict(each.splits)
            for name in [name for name in splits if name.endswith(ending)]:
                length = module.get_parameter(name).shape[splits[name].dim]
                other = change(splits.pop(name), length)
                splits |= {} if other is None else {name: other}
            changed.append(replace(each, splits=splits))
        return changed

    return apply


def _and(*mistakes: Mistake) -> Mistake:
    def apply(proposals: Proposals, module: nn.Module) -> Proposals:
        for mistake in mistakes:
            proposals = mistake(proposals, module)
        return proposals

    return apply


def _added(layer: str, ending: str, dim: int = 0) -> Mistake:
    """A split of a tensor that should be whole, in the region that has a layer."""

    def apply(proposals: Proposals, module: nn.Module) -> Proposals:
        changed = []
        for each in proposals:
            owners = [name.removesuffix(layer) for name in each.splits if name.endswith(layer)]
            more = {f"{owner}{ending}": DimensionSplit(dim, "tp") for owner in owners}
            changed.append(replace(each, splits={**each.splits, **more}))
        return changed

    return apply


def _attributes(change: Callable[[str, int], int | None]) -> Mistake:
    def apply(proposals: Proposals, module: nn.Module) -> Proposals:
        changed = []
        for each in proposals:
            values = [(path, name, change(name, value)) for path, name, value in each.attributes]
            kept = tuple((path, name, value) for path, name, value in values if value is not None)
            changed.append(replace(each, attributes=kept, spare=()))
        return changed

    return apply


def _other_dim(split: DimensionSplit, _: int) -> DimensionSplit:
    return replace(split, dim=1 - split.dim, parts=())


def _halved(split: DimensionSplit, _: int) -> DimensionSplit:
    """Two fused parts where there is one, or four where there are two."""
    return replace(split, parts=tuple(part // 2 for part in split.parts for _ in (0, 1)), unit=1)


def _three_blocks(split: DimensionSplit, length: int) -> DimensionSplit:
    return replace(split, parts=(length // 3,) * 3)


def _one_part(split: DimensionSplit, _: int) -> DimensionSplit:
    return replace(split, parts=())


def _rotated(split: DimensionSplit, _: int) -> DimensionSplit:
    return replace(split, parts=(*split.parts[1:], split.parts[0]))


_FUSED: dict[str, Mistake] = {
    "queries, keys and values as one": _tensor("qkv.weight", _one_part),
    "keys and values before queries": _tensor("qkv.weight", _rotated),
    "inputs of queries, keys and values": _tensor("qkv.weight", _other_dim),
    "queries, keys and values whole": _tensor("qkv.weight", lambda *_: None),
    "biases of queries, keys and values as one": _tensor("qkv.bias", _one_part),
    "biases of queries, keys and values whole": _tensor("qkv.bias", lambda *_: None),
    "weights and biases in another order": _and(_tensor("qkv.weight", _rotated), _tensor("qkv.bias", _rotated)),
    "outputs of the row layer": _tensor("attention.output.weight", _other_dim),
    "row layer whole": _tensor("attention.output.weight", lambda *_: None),
    "gate and up as one": _and(_tensor("ffn.up.weight", _one_part), _tensor("ffn.up.bias", _one_part)),
    "gate and up interleaved": _and(_tensor("ffn.up.weight", _halved), _tensor("ffn.up.bias", _halved)),
    "biases of gate and up as one": _tensor("ffn.up.bias", _one_part),
    "inputs of gate and up": _tensor("ffn.up.weight", _other_dim),
    "outputs of down": _tensor("ffn.down.weight", _other_dim),
    "down whole": _tensor("ffn.down.weight", lambda *_: None),
    "norm of each head, split": _added("attention.qkv.weight", "attention.query_norm.weight"),
    "bias of the row layer, split": _added("attention.output.weight", "attention.output.bias"),
    "numbers of heads of the whole": _attributes(lambda name, value: None),
    "key heads of the whole": _attributes(lambda name, value: None if "kv" in name else value),
    "half of the heads": _attributes(lambda name, value: max(1, value // 2) if name == "heads" else value),
    "twice the key heads": _attributes(lambda name, value: 2 * value if "kv" in name else value),
}
_LLAMA: dict[str, Mistake] = {
    "keys whole": _tensor("k_proj.weight", lambda *_: None),
    "values whole": _tensor("v_proj.weight", lambda *_: None),
    "inputs of queries": _tensor("q_proj.weight", _other_dim),
    "inputs of the gate": _tensor("gate_proj.weight", _other_dim),
    "gate whole": _tensor("gate_proj.weight", lambda *_: None),
    "outputs of down": _tensor("down_proj.weight", _other_dim),
}
_NEOX: dict[str, Mistake] = {
    "blocked in place of interleaved": _and(
        _tensor("query_key_value.weight", _three_blocks),
        _tensor("query_key_value.bias", _three_blocks),
    ),
    "inputs of the fused projection": _tensor("query_key_value.weight", _other_dim),
    "its bias whole": _tensor("query_key_value.bias", lambda *_: None),
}


def _verdicts(
    job: Job, prove: Callable[[Job], object], mistakes: dict[str, Mistake], monkeypatch: pytest.MonkeyPatch
) -> dict[str, bool]:
    """Mistake -> whether the proof refuses it, on the model that it runs."""
    verdicts, check_all = dict[str, bool](), split_proof._SplitSearch._check_all

    def check(search: split_proof._SplitSearch) -> frozenset[str]:
        proven, partial_names = list(search.proven), check_all(search)
        assert search.proven == proven and proven
        for name, mistake in mistakes.items():
            planted = mistake(proven, search.module)
            assert planted != proven, f"{name} changes nothing"
            search.proof.forget()
            verdicts[name] = isinstance(search._compare(planted, stops=False), ProofMismatchError)
        search.proof.forget()
        assert not isinstance(search._compare(proven, stops=False), ProofMismatchError)
        search.proof.forget()
        return partial_names

    with monkeypatch.context() as patched:
        patched.setattr(split_proof._SplitSearch, "_check_all", check)
        prove(job)
    return verdicts


def _by_twin(job: Job) -> object:
    return proposed_sharding._sharding_by_twin(job, _model(job), check_job(job, job.layout.dims.ranks))


def _by_itself(job: Job) -> object:
    model = _model(job)
    return proposed_sharding._proven(
        job, model, RandomBatches(job, model), layout=check_job(job, job.layout.dims.ranks)
    )


def _model(job: Job) -> TrainableModel:
    return build_trainable_model(job.model, 0, torch.float32, torch.device("cpu"), on_meta=True)


def _check(job: Job, mistakes: dict[str, Mistake], monkeypatch: pytest.MonkeyPatch) -> None:
    twin_verdicts, model_verdicts = (_verdicts(job, prove, mistakes, monkeypatch) for prove in (_by_twin, _by_itself))
    assert twin_verdicts == model_verdicts
    assert [name for name, is_refused in twin_verdicts.items() if not is_refused] == []


def test_fused_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*_COMMON, f"model={{{_OWN}}}", *_layout_words("tp=2")]
    _check(load_job("tiny", words), _FUSED, monkeypatch)


@pytest.mark.parametrize(
    ("family", "mistakes"), [("gpt_neox", _NEOX), pytest.param("llama", _LLAMA, marks=pytest.mark.proof)]
)
def test_families(family: str, mistakes: dict[str, Mistake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(_family_job(family, "tp=2", tmp_path), mistakes, monkeypatch)
