"""The split that is proven on a smaller twin is the one that is proven on the model itself."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pages.tensor_parallel_families import FAMILIES

from motet.core.errors import InputError
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.spec.shrink import SmallSizes
from motet.parallel.model_sharding import ModelSharding
from motet.parallel.proof.twin_match import TwinMismatchError
from motet.train.job import Job, load_job
from motet.train.launch.preflight import check_job
from motet.train.proof import proposed_sharding, twin_of_job
from motet.train.proof.proposed_sharding import RandomBatches

# Sizes of the families that are large enough for a smaller twin, by their names in configs.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 192),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner"), 208),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 32),
    "vocab_size": 1000,
}
_SHAPES = ["tp=2", "tp=4 sp=true", "tp=8", "pp=3 microbatches=4", "tp=2 pp=2 sp=true microbatches=4"]
_QUICK = {"gpt2": ["tp=2 sp=true"], "gemma2": ["pp=3"]}
_WIDE = "heads=8, hidden=192, ffn_hidden=208, layers=6, vocab_size=1000"
_OWN = {
    "decoder": f"family='decoder', {_WIDE}, kv_heads=4, tied=false",
    "tied": "family='decoder', heads=9, kv_heads=3, hidden=180, ffn_hidden=328, layers=5, vocab_size=1003, tied=true",
    "encoder": f"family='encoder', {_WIDE}",
    "t5": "family='encoder-decoder', heads=8, hidden=256, ffn_hidden=272, layers=6, vocab_size=1000",
}
_BASE = {"vocab_size": 1003, "num_hidden_layers": 6, "hidden_size": 192, "num_attention_heads": 8}
_OBJECTIVES = {"encoder": "masked", "t5": "spans"}
_COMMON = ["data.sequence_length=24", "data.batch_sequences=8", "data.tokenizer=bytes"]


def _layout_words(layout: str) -> list[str]:
    return [f"layout.{word}" for word in f"dp=1 {layout}".split()]


def _family_job(family: str, layout: str, folder: Path) -> Job:
    architecture, config, more = FAMILIES[family]
    sizes = {name: _SIZES.get(name, value) for name, value in config.items()}
    if family == "stablelm":  # Its attention divides the width by the heads, its rotation asks for the head's size
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    where = Path(tempfile.mkdtemp(dir=folder))
    (where / "config.json").write_text(json.dumps({"model_type": family, "architectures": [architecture], **sizes}))
    return load_job("tiny", [*_COMMON, f"model={{factory='hf:{where}'}}", *more, *_layout_words(layout)])


def _own_job(name: str, layout: str) -> Job:
    objective = f"data.objective={_OBJECTIVES.get(name, 'causal')}"
    return load_job("tiny", [*_COMMON, objective, f"model={{context=64, {_OWN[name]}}}", *_layout_words(layout)])


def _sized_job(layout: str = "tp=2", kind: str = "Sized", **arguments: Any) -> Job:
    sizes = {"hidden_size": 160, "intermediate_size": 208, "num_hidden_layers": 6} if kind == "Sized" else {}
    words = ", ".join(f"{name}={value}" for name, value in {**sizes, **arguments}.items())
    model = f"model={{factory='train.sized_models:{kind}', arguments={{{words}}}}}"
    return load_job("tiny", [*_COMMON, "precision.recipe=fp64", model, *_layout_words(layout)])


def _model(job: Job) -> TrainableModel:
    dtype = getattr(torch, job.precision.resolved.master)
    return build_trainable_model(job.model, 0, dtype, torch.device("cpu"), on_meta=True)


def _by_twin(job: Job) -> ModelSharding:
    layout = check_job(job, job.layout.dims.ranks)
    return proposed_sharding._sharding_by_twin(job, _model(job), layout)[0]


def _by_itself(job: Job) -> ModelSharding:
    model = _model(job)
    return proposed_sharding._proven(
        job, model, RandomBatches(job, model), layout=check_job(job, job.layout.dims.ranks)
    )


def _comparable(sharding: ModelSharding) -> dict[str, object]:
    """The fields, without texts that name sizes of shards, and without an order that means nothing."""
    values = {each.name: getattr(sharding, each.name) for each in fields(sharding) if each.name != "proof"}
    values["rules"] = {name: (rule.splits, rule.partial_over) for name, rule in sharding.rules.items()}
    values["unsplit_streams"] = [module for module, _ in sharding.unsplit_streams]
    for name in ("attributes", "activations"):
        values[name] = sorted(values[name], key=str)
    return values


def _check_agreement(job: Job) -> None:
    twin_proof, model_proof = _by_twin(job), _by_itself(job)
    assert "smaller model" in twin_proof.proof and not model_proof.proof
    assert _comparable(twin_proof) == _comparable(model_proof)


def _cases(quick: dict[str, list[str]], names: Sequence[str], layouts: Sequence[str]) -> list[Any]:
    return [
        pytest.param(name, layout, marks=() if layout in quick.get(name, ()) else pytest.mark.proof)
        for name in names
        for layout in dict.fromkeys([*layouts, *quick.get(name, ())])
    ]


@pytest.mark.parametrize(("family", "layout"), _cases(_QUICK, list(FAMILIES), _SHAPES))
def test_a_family_has_the_split_of_its_twin(family: str, layout: str, tmp_path: Path) -> None:
    _check_agreement(_family_job(family, layout, tmp_path))


@pytest.mark.parametrize(("family", "ranks"), _cases({"llama": ["tp=8"]}, list(FAMILIES), ["tp=8"]))
def test_a_family_has_the_split_of_its_twin_over_fewer_ranks(
    family: str, ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin_of_job, "MOST_RANKS", 4)
    job = _family_job(family, ranks, tmp_path)
    assert family != "llama" or _by_twin(job).proof.endswith(", over 4 of 8 ranks")
    _check_agreement(job)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp=8 sp=true", "tp=8 pp=2 sp=true microbatches=4"])
def test_stages_and_tokens_are_those_of_all_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_of_job, "MOST_RANKS", 4)
    job = _own_job("decoder", layout)
    assert _by_twin(job).proof.endswith(", over 4 of 8 ranks")
    _check_agreement(job)


def test_fewer_ranks_that_have_other_shares_do_not_stand_for_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_of_job, "MOST_RANKS", 4)
    sizes = "hidden_size=192, num_hidden_layers=3, vocab_size=264"
    model = f"model={{factory='train.sized_models:four_heads', arguments={{{sizes}}}}}"
    job = load_job("tiny", [*_COMMON, "precision.recipe=fp64", model, *_layout_words("tp=8")])
    sharding = _by_twin(job)
    assert "smaller model" in sharding.proof and "ranks" not in sharding.proof  # 4 ranks would have a head each
    _check_agreement(job)


def test_many_ranks_are_proven_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("llama3-405b", ["data.batch_sequences=64", *_layout_words("tp=64")])
    sharding = _by_twin(job)
    assert sharding.proof.endswith(", over 8 of 64 ranks")
    (up,) = sharding.rules["blocks.125.ffn.up.weight"].splits
    assert (up.parts, up.unit) == ((53248, 53248), 1)
    reason = sharding.rules["blocks.7.attention.qkv.weight"].reason
    assert reason == "128 and 8 heads of 128 elements cannot be split over tp = 64; use a divisor of both"


@pytest.mark.parametrize("degree", [3, pytest.param(6, marks=pytest.mark.proof)])
def test_a_number_of_ranks_that_divides_fused_products_alone_has_a_twin(degree: int) -> None:
    sharding = _by_twin(load_job("llama3-8b", ["data.batch_sequences=64", *_layout_words(f"tp={degree}")]))
    assert "smaller model of 3 of 32 blocks" in sharding.proof
    reason = sharding.rules["blocks.7.ffn.up.weight"].reason
    assert reason == f"14336 elements cannot be split over tp = {degree}; use a divisor or a multiple of 14336"


@pytest.mark.proof
def test_key_heads_of_another_number_than_an_unused_setting_says(tmp_path: Path) -> None:
    config = {"num_kv_heads": 2, "num_key_value_heads": 4, "new_decoder_architecture": True, **_BASE}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", **config}))
    model = f"model={{factory='hf:{tmp_path}'}}"
    _check_agreement(load_job("tiny", [*_COMMON, model, *_layout_words("tp=4")]))


@pytest.mark.parametrize(
    ("model", "layout"),
    _cases({"decoder": ["tp=2 pp=2 sp=true microbatches=4"]}, list(_OWN), [*_SHAPES, "tp=3 pp=3"]),
)
def test_an_architecture_has_the_split_of_its_twin(model: str, layout: str) -> None:
    if model != "tied" or "tp=3" in layout or "tp" not in layout:
        _check_agreement(_own_job(model, layout))


def test_a_factory_with_sizes_has_the_split_of_its_twin() -> None:
    _check_agreement(_sized_job("tp=2 pp=2 microbatches=4"))


@pytest.mark.parametrize(
    ("style", "layout"),
    [("nanoGPT", "tp=2 pp=2 sp=true microbatches=4"), pytest.param("minGPT", "tp=4", marks=pytest.mark.proof)],
)
def test_attention_that_computes_with_the_width_of_its_input_has_the_split_of_its_twin(style: str, layout: str) -> None:
    sizes = f"style='{style}', n_layer=6, n_head=8, n_embd=192, vocab_size=260"
    model = f"model={{factory='parallel.attention_styles:LanguageModel', arguments={{{sizes}}}}}"
    job = load_job("tiny", [*_COMMON, "precision.recipe=fp64", model, *_layout_words(layout)])
    assert _by_twin(job).input_widths
    _check_agreement(job)


def test_sizes_are_those_of_the_model() -> None:
    job = load_job("llama3-8b", ["data.batch_sequences=64", *_layout_words("tp=2 pp=4")])
    sharding = _by_twin(job)
    (qkv,) = sharding.rules["blocks.17.attention.qkv.weight"].splits
    assert (qkv.dim, qkv.parts, qkv.unit) == (0, (4096, 1024, 1024), 128)
    (up,) = sharding.rules["blocks.31.ffn.up.weight"].splits
    assert (up.parts, up.unit) == ((14336, 14336), 1)
    assert sharding.rules["embedding.weight"].reason.startswith("128256 entries")
    assert [stage.stop for stage in sharding.stages][-1] == 32 and len(sharding.wires) == 3
    assert {wire.dims for wires in sharding.wires for wire in wires} == {("rows", "tokens", 4096)}
    heads = {(name.partition(".")[2], value) for _, name, value in sharding.attributes if "head" in name}
    assert all(value in (4, 16) for _, value in heads)
    widths = {size.width for comm in sharding.boundary_comms for size in comm.sizes if comm.argument != "loss"}
    assert widths == {4096}


# --- a model that has no twin -----------------------------------------------------------------------------


def test_another_way_through_the_code_at_full_width_is_noticed() -> None:
    job = _sized_job(wide_from=100)
    sharding = _by_twin(job)
    assert "at full width" in sharding.proof and "since block blocks.0 differ from the twin's: " in sharding.proof
    assert not sharding.rules["blocks.0.up.weight"].splits
    assert _comparable(sharding) == _comparable(_by_itself(job))
    assert _by_twin(_sized_job(wide_from=1000)).rules["blocks.0.up.weight"].splits


@pytest.mark.parametrize("order", ["width", "sizes"])
def test_other_sizes_of_the_same_operators_are_noticed(order: str) -> None:
    job = _sized_job(kind="Reordered", order=f"'{order}'")
    sharding = _by_twin(job)
    assert "at full width" in sharding.proof
    assert _comparable(sharding) == _comparable(_by_itself(job))


def test_blocks_of_another_order_in_the_middle_are_noticed() -> None:
    for kind, order in {"Reordered": {"order": "'middle'"}, "Interleaved": {}}.items():
        job = _sized_job(kind=kind, **order)
        sharding = _by_twin(job)
        assert not sharding.rules["blocks.3.qkv.weight"].splits, kind
        assert _comparable(sharding) == _comparable(_by_itself(job)), kind


def test_a_tensor_that_later_blocks_read_is_passed_on_as_in_the_model() -> None:
    job = _sized_job("pp=3 microbatches=4", kind="Anchored", num_hidden_layers=12)
    sharding = _by_twin(job)
    assert "smaller model of 7 of 12 blocks" in sharding.proof
    assert all(any(wire.is_constant for wire in wires) for wires in sharding.wires)
    assert _comparable(sharding) == _comparable(_by_itself(job))


def test_a_block_of_another_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_of_job, "_BLOCKS", (3, 6))
    job = _sized_job(odd=8, num_hidden_layers=10)
    sharding = _by_twin(job)
    assert "4 of 10 blocks" in sharding.proof
    assert "since block blocks.8 differ from the twin's: shifted = True in place of False" in sharding.proof
    assert _comparable(sharding) == _comparable(_by_itself(job))
    _check_agreement(_sized_job(odd=3, num_hidden_layers=7))


def _refuse_twin(*_: object, **__: object) -> None:
    raise TwinMismatchError("it is refused")


def test_few_entries_are_those_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposed_sharding, "make_twin", _refuse_twin)
    sizes = "heads=4, hidden=64, ffn_hidden=1101, layers=4, vocab_size=1101, tied=false, context=64"
    job = load_job("tiny", [*_COMMON, f"model={{family='decoder', {sizes}}}", *_layout_words("tp=2")])
    sharding = _by_twin(job)
    assert sharding.proof == (
        "proven block by block at full width (3 of 4 blocks, 517 of 1101 entries), since it is refused"
    )
    assert _comparable(sharding) == _comparable(_by_itself(job))


def test_a_model_of_which_all_is_kept_is_not_proven_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposed_sharding, "make_twin", _refuse_twin)
    with pytest.raises(TwinMismatchError, match=r"^it is refused; and a proof would need all of its blocks"):
        _by_twin(_sized_job(num_hidden_layers=3))


def test_settings_in_an_unknown_form_are_no_error_of_python() -> None:
    job = _sized_job(attention_types=5)
    with pytest.raises(TwinMismatchError, match=r"^motet finds no smaller values of the settings of train\.sized"):
        twin_of_job._small_settings(job.model, SmallSizes())


def test_a_model_with_layers_in_kinds_that_repeat_has_a_twin(tmp_path: Path) -> None:
    kinds = {"attention_types": [[["global", "local"], 3]], "attention_layers": ["global", "local"] * 3}
    sizes = {"hidden_size": 64, "num_heads": 4, "num_layers": 6, "vocab_size": 1003, "window_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neo", **sizes, **kinds}))
    job = load_job("tiny", [*_COMMON, f"model={{factory='hf:{tmp_path}'}}", *_layout_words("tp=2")])
    assert "smaller model of 4 of 6 blocks" in _by_twin(job).proof


def test_a_module_without_sizes_is_proven_block_by_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(proposed_sharding, "LARGEST_WITHOUT_TWIN", 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    job = _sized_job("tp=2 pp=2 microbatches=4", kind="Unsized")
    model, layout = _model(job), check_job(job, 4)
    sharding = proposed_sharding.sharding_of_model(job, model, RandomBatches(job, model), layout=layout)
    assert sharding.proof == (
        "proven block by block at full width (4 of 6 blocks, 514 of 5002 entries), since no argument of model.factory "
        "is a size that motet knows"
    )
    assert _comparable(sharding) == _comparable(_by_itself(job))
    monkeypatch.setattr(twin_of_job, "_BYTES_PER_ELEMENT", 1 << 40)
    with pytest.raises(InputError, match=r"takes .* for Unsized.*Let model\.factory take its sizes"):
        proposed_sharding.sharding_of_model(
            job.model_copy(update={"layout": job.layout.model_copy(update={"sp": True})}),
            model,
            RandomBatches(job, model),
            layout=layout,
        )
