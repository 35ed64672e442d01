"""Settings that would do nothing, and jobs that cannot run, are refused before ranks start, and nothing else is."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.core.text_files import to_toml
from motet.data.corpus.token_store import PreparedData
from motet.train.config_rules import SETTING_REQUIREMENTS
from motet.train.job import Job, builtin_jobs, job_from_tree, load_job
from motet.train.launch.preflight import check_data, check_job
from motet.train.launch.run_folder import job_to_tree
from refusals import refused

SMALL = {"vocab_size": 260, "context": 32, "layers": 1, "hidden": 16, "heads": 2, "ffn_hidden": 16}


def job(folder: Path, **sections: dict[str, object]) -> Job:
    tree = {"model": SMALL, "run": {"steps": 3}, **sections}
    tree["model"] = {**SMALL, **tree["model"]}
    (folder / "small.toml").write_text(to_toml(tree), encoding="utf-8")
    return load_job(str(folder / "small.toml"))


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("optimizer={name='sgd', eps=1e-6}", "eps = 1e-06 has no effect with optimizer.name = 'sgd'; leave it"),
        (
            "precision={recipe='fp64', reduce_dtype='bfloat16'}",
            "precision.reduce_dtype = 'bfloat16' has no effect with .* 'fp64'; .* set .*=fp32 or tf32 or bf16 or fp16$",
        ),
        ("optimizer={momentum=0.0}", "optimizer.momentum = 0.0 .* 'adamw'; leave it out, or set optimizer.name=sgd"),
        ("optimizer={schedule={decay_steps=5}}", "kind = 'cosine'; .* set .*kind=warmup-stable-decay$"),
        (
            "optimizer={schedule={kind='constant', final_fraction=0.0}}",
            r"schedule\.final_fraction = 0\.0 has no effect .*=linear or cosine or warmup-stable-decay$",
        ),
        ("data={mask_fraction=0.2}", "with data.objective = 'causal'; leave it out, or set .*=masked or spans"),
        ("data={source='a', mixture=[{source='b'}]}", "data.source = 'a' .* together with data.mixture; leave one"),
        ("monitor={profile_steps=2}", r"profile_steps = 2 has no effect without monitor\.profile_from; leave"),
        ("model={positions='learned', rope_scaling={}}", r"model\.rope_scaling has no effect with"),
        ("model={norm_bias=true}", r"model\.norm_bias = true has no effect with model\.norm = 'rms'"),
        ("layout={zero=2, reshard_after_forward=false}", r"ward = false .* layout\.zero = 2; .* set layout\.zero=3$"),
        ("model={family='encoder', classes=3}", r"model\.classes = 3 .* model\.head = 'masked'; leave it out"),
        ("layout={sp=true}", r"layout\.sp = true has no effect with layout\.tp = 1; .* set layout\.tp=2 or more$"),
        ("layout={cp_kind='ring', tp=2}", r"cp_kind = 'ring' has no effect with layout\.cp = 1"),
        ("layout={chunks=2}", r"layout\.chunks = 2 has no effect with layout\.pp = 1"),
        ("layout={schedule='gpipe'}", r"schedule = 'gpipe' has no effect with layout\.pp = 1"),
        ("layout={stages='0-3'}", r"stages = '0-3' has no effect with layout\.pp = 1; .* set layout\.pp=2 or more$"),
        ("communication={bucket_mib=4.0}\nlayout={zero=3}", r"bucket_mib = 4\.0 .* layout\.zero = 3; .*=0 or 1 or 2$"),
        ("memory={update='delayed'}", r"set memory\.optimizer=host or disk, or memory\.tiers=auto$"),
        ("memory={folder='a'}", r"folder = 'a' has no effect .* set memory\.optimizer=disk, or memory\.tiers=auto$"),
        (
            "communication={overlap='forward'}\nlayout={zero=3}",
            r"set layout\.zero=0 or 1 or 2, or memory\.optimizer=host or disk, or memory\.tiers=auto$",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, toml: str, says: str) -> None:
    refused(says, job, tmp_path, **tomllib.loads(toml))


def test_what_has_an_effect_may_be_set(tmp_path: Path) -> None:
    job(tmp_path, optimizer={"name": "sgd", "momentum": 0.9}, data={"objective": "masked", "mask_fraction": 0.2})
    job(tmp_path, monitor={"profile_from": 2, "profile_steps": 2}, data={"mixture": [{"source": "b"}]})
    job(tmp_path, optimizer={"schedule": {"kind": "warmup-stable-decay", "decay_steps": 5}})
    job(tmp_path, model={"family": "encoder", "head": "classify", "classes": 3})
    job(tmp_path, communication={"bucket_mib": 4.0}, layout={"zero": 2})
    job(tmp_path, layout={"tp": 2, "sp": True, "cp": 2, "cp_kind": "all-gather"})
    job(tmp_path, layout={"pp": 2, "chunks": 2, "schedule": "zb-v", "stages": "0,1,2,3"})


@pytest.mark.parametrize("name", builtin_jobs())
def test_a_resolved_job_says_only_what_has_an_effect(name: str) -> None:
    whole = load_job(name)
    tree = job_to_tree(whole)
    assert job_from_tree(tree) == whole and "final_fraction" in to_toml(tree)
    assert ("betas" in tree["optimizer"], "momentum" in tree["optimizer"]) == (True, False)


def test_an_override_takes_away_what_it_makes_idle() -> None:
    changed = load_job("bert-tiny", ["optimizer.name=sgd", "optimizer.schedule={kind='constant'}"])
    assert changed.optimizer.betas == (0.9, 0.95)  # the default, not the (0.9, 0.98) of the file
    assert load_job("tiny", ["monitor.sample_tokens=0"]).monitor.sample_prompt == ""
    with pytest.raises(InputError, match=r"optimizer\.betas = \[0\.5, 0\.6\] has no effect with .* 'sgd'"):
        load_job("bert-tiny", ["optimizer.name=sgd", "optimizer.betas=[0.5,0.6]"])
    refused(r"unknown key 'monitor.sampel'", load_job, "tiny", ["monitor.sample_tokens=0", "monitor.sampel=1"])


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_job_with_states_on_disk_can_be_given_another_place(tmp_path: Path, place: str) -> None:
    job(tmp_path, memory={"optimizer": "disk", "folder": "a", "update": "delayed"})
    memory = load_job(str(tmp_path / "small.toml"), [f"memory.optimizer={place}"]).memory
    assert (memory.optimizer, memory.folder) == (place, None)
    assert memory.update == ("delayed" if place == "host" else "exact")


def test_the_table_speaks_of_settings_that_there_are() -> None:
    schema = Job.model_json_schema()
    fields = {name for kind in schema["$defs"].values() for name in kind.get("properties", {})}
    for needs in SETTING_REQUIREMENTS:
        keys = needs.setting, *needs.depends_on.split(" or ")
        assert {key.rpartition(".")[2] for key in keys} <= fields


DATA = PreparedData(corpora=(), tokenizer="bytes", sentinels=0, vocab_size=260, classes=2, train_samples=9)


@pytest.mark.parametrize("name", builtin_jobs())
def test_built_in_jobs_can_be_trained(name: str) -> None:
    job = load_job(name)
    assert check_job(job, job.run.ranks).dims.ranks == job.run.ranks


MIXTURE = "model.experts={count=8, per_token=5, hidden=8%s}"
LATENT = "model.latent_attention={key_value_rank=8, rotary_head_dim=8, plain_head_dim=8, value_head_dim=8}"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([MIXTURE % ", groups=4, groups_per_token=2"], r"per_token = 5 is more than the 4 experts .* leave"),
        ([MIXTURE % ", groups=4, groups_per_token=5"], r"groups_per_token = 5 is more than model\.experts\.groups = 4"),
        ([MIXTURE % ", groups=3"], r"groups = 3 does not divide model\.experts\.count = 8"),
        ([MIXTURE % ", groups=8"], r"at least two experts"),
        ([MIXTURE % ", capacity=1.25"], r"capacity = 1\.25 drops assignments; set model\.experts\.drop"),
        ([MIXTURE % ", drop='last'"], r"drop = 'last' needs model\.experts\.capacity"),
        (["model.balance.kind=row"], r"model\.balance balances the load of experts"),
        (["model.balance.z_weight=1e-3"], r"model\.balance balances the load of experts"),
    ],
)
def test_settings_of_mixtures_that_do_not_fit(overrides: list[str], problem: str) -> None:
    refused(problem, load_job, "tiny", overrides)


@pytest.mark.parametrize("setting", ["kv_heads=2", "positions='learned'", "rotary_fraction=0.5"])
def test_latent_attention_with_what_it_does_not_have_is_for_planning(setting: str) -> None:
    job = load_job("tiny", [LATENT, "model.kv_heads=8", f"model.{setting}"])
    name, _, value = setting.partition("=")
    refused(rf"model\.{name} = {value} does not fit model\.latent_attention", check_job, job, 2)


@pytest.mark.parametrize(
    ("name", "objective", "fits"),
    [("tiny", "spans", "causal"), ("bert-tiny", "causal", "masked"), ("bert-classify", "masked", "classify")],
)
def test_each_model_has_its_objective(name: str, objective: str, fits: str) -> None:
    job = load_job(name, [f"data.objective={objective}"])
    refused(rf"data\.objective = '{objective}' does not fit .*objective={fits}$", check_job, job, job.run.ranks)


def test_a_model_of_somebody_else_may_have_any_objective() -> None:
    model = "model={factory='a:b'}"
    for objective in ("causal", "masked", "spans", "classify"):
        check_job(load_job("tiny", [model, f"data.objective={objective}", "data.sequence_length=9999"]), 2)


def classifier(*overrides: str) -> Job:
    return load_job("bert-classify", ["model.vocab_size=260", *overrides])


def test_tokens_and_classes_that_the_model_has_no_place_for() -> None:
    check_data(classifier(), DATA)
    check_data(classifier("model.classes=5"), DATA)
    with pytest.raises(InputError, match=r"model\.classes = 2, but the data has 3; set model\.classes=3"):
        check_data(classifier(), replace(DATA, classes=3))
    with pytest.raises(InputError, match=r"model\.vocab_size = 259 is less than the 260 tokens .*=260 or more"):
        check_data(classifier("model.vocab_size=259"), DATA)
    check_data(load_job("tiny", ["model={factory='a:b'}"]), replace(DATA, vocab_size=10**6, classes=9))
