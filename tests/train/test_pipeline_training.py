"""Training in pipelines computes the numbers of one device, for every pair of what a job may combine."""

from functools import cache
from pathlib import Path

import pytest

from covering_array import Case, covering_array, uncovered_pairs
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.train.proof.proposed_sharding import sharding_of_job
from ranks import Ranks
from refusals import refused
from train.pipeline_runs import ALWAYS_TIED, MODELS, job_of_model
from train.runs import Trained, small_job, worst_difference
from train.tensor_parallel_runs import STEPS, train_and_reassemble
from train.test_reproducible import unlike
from train.test_tensor_parallel_training import ALONE

TOLERANCE = 1e-12
IN_SCHEDULES = ("decoder", "gpt2-like", "bert", "t5", "llama", "gpt2", "gemma2")
FACTORS = {
    "model": IN_SCHEDULES,
    "schedule": tuple(SCHEDULES),
    "pp": (2, 3, 4),
    "microbatches": (1, 3, 4, 8, 12),
    "tied": (False, True),
    "dropout": (0.0, 0.1),
}


def is_possible(case: Case) -> bool:
    return bool(case["tied"]) or case["model"] not in ALWAYS_TIED


CASES = covering_array(FACTORS, is_possible)


def case_of(*values: object, data: str = "") -> Case:
    """A case of these values of `FACTORS`, with the layout of the ranks that hold a stage."""
    return {**dict(zip(FACTORS, values, strict=True)), "data": data}


# A handful for `make test`.
QUICK = [
    case_of("gpt2-like", "1f1b", 2, 4, True, 0.1),
    case_of("decoder", "zb-v", 2, 4, False, 0.1, data="dp=2 zero=3"),
]
MORE = [
    case_of("t5", "interleaved", 2, 3, True, 0.0),
    case_of("llama", "dualpipe-v", 2, 4, False, 0.0, data="tp=2"),
]
# Layouts of the ranks that hold a stage; each stands in two cases, with different models and schedules.
DATA = (
    *(f"dp=2 zero={stage}" for stage in range(4)),
    *(f"dp=2 zero={stage} reduce_gradients=step" for stage in (2, 3)),
    *(f"dp=4 zero={stage} shard_group=2" for stage in (1, 2, 3)),
    "dp=2 zero=3 min_shard_numel=300",
    "dp=2 zero=3 reshard_after_forward=false",
    "dp=4 zero=3 secondary_group=2",
    *(f"dp=2 zero={stage} overlap=forward" for stage in (0, 2)),
    *("tp=2", "tp=2 sp=true"),
    *(f"tp=2 dp=2 zero={stage}" for stage in range(4)),
    "pp=4 dp=2 zero=0",
    "pp=4 dp=2 zero=3",
)


def composition(index: int) -> Case:
    """A case with a layout of `DATA`, some model and some schedule. OPT, of whose blocks FSDP2 warns, is never at stage
    3 of ZeRO."""
    model, schedule = MODELS[index % len(MODELS)], list(SCHEDULES)[index % len(SCHEDULES)]
    data, pp = DATA[index % len(DATA)].removeprefix("pp=4 "), 4 if "pp=4" in DATA[index % len(DATA)] else 2
    tied = model in ALWAYS_TIED or (index + index // len(DATA)) % 2 == 0
    microbatches = 6 if pp == 4 else 3 if "dp=4" in data else 4
    return case_of(model, schedule, pp, microbatches, tied, 0.1, data=data)


COMPOSITIONS = [composition(index) for index in range(2 * len(DATA))]


def layout_settings(case: Case) -> list[str]:
    chunks = 1 if SCHEDULES[case["schedule"]].chunks == 1 else 2
    words = [f"pp={case['pp']}", f"chunks={chunks}", f"schedule={case['schedule']}"]
    words += [f"microbatches={case['microbatches']}"] * bool(case["microbatches"]) + case.get("data", "").split()
    return [f"communication.{word}" if word.startswith("overlap") else f"layout.{word}" for word in words]


def ranks_of(case: Case) -> int:
    sizes = dict(word.split("=") for word in case.get("data", "").split())
    return int(case["pp"]) * int(sizes.get("dp", 1)) * int(sizes.get("tp", 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@cache
def alone(folder: Path, model: str, dropout: float, tied: bool, *overrides: str, steps: int = STEPS) -> Trained:
    """The same job on one device."""
    job = job_of_model(folder, model, *overrides, dropout=dropout, tied=tied)
    trained = train_and_reassemble(ALONE, job, steps)
    assert trained is not None and trained.losses[-1] < trained.losses[0]
    return trained


def name_of(case: Case) -> str:
    return " ".join(str(value).replace(" ", ",") for value in case.values())


def trained_on(ranks: Ranks, folder: Path, case: Case, *overrides: str, steps: int = STEPS) -> Trained:
    job = job_of_model(
        folder, case["model"], *layout_settings(case), *overrides, dropout=case["dropout"], tied=case["tied"]
    )
    first, *_ = ranks.run(ranks_of(case), train_and_reassemble, job, steps, timeout_s=300)
    assert first is not None
    return first


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.proof) for case in (*MORE, *CASES, *COMPOSITIONS))],
    ids=name_of,
)
def test_ranks_train_as_one_device(ranks: Ranks, folder: Path, case: Case) -> None:
    """Loss, norm, all gradients, and parameters after ten steps."""
    expected = alone(folder, case["model"], case["dropout"], case["tied"])
    assert worst_difference(trained_on(ranks, folder, case), expected) < TOLERANCE


def test_the_cases_cover_every_possible_pair() -> None:
    untied = [{"model": model, "tied": False} for model in ALWAYS_TIED if model in FACTORS["model"]]
    assert [pair for pair in uncovered_pairs(FACTORS, CASES) if pair not in untied] == []
    assert len(CASES) <= 60


ADAPTED = ["model.adapters={rank=4, targets=['*q_proj', '*up_proj']}"]
SLICES = "communication.slice_activations=true"
# (model, layout, settings of the job alone as well, settings of the ranks); `make test` takes the first
FEATURES: list[tuple[str, str, list[str], list[str]]] = [
    ("decoder", "pp=2 tp=2 microbatches=4", [], [SLICES]),
    ("llama", "pp=2 chunks=2 schedule=zb-v microbatches=4", ADAPTED, []),
    ("t5", "pp=2 tp=2 chunks=2 schedule=interleaved microbatches=4", [], [SLICES]),
    ("gpt2", "pp=2 tp=2 sp=true microbatches=3", [], [SLICES]),
    ("gpt2-like", "pp=2 dp=2 zero=2 microbatches=3", ["model.frozen=['embedding*', '*blocks.[0-4].*']"], []),
    ("llama", "pp=2 dp=2 zero=3 microbatches=3", ["model.frozen=['*layers.[4-7].*', '*lm_head*']"], []),
    ("llama", "pp=2 tp=2 microbatches=3", ADAPTED, []),
    ("decoder", "pp=2 dp=2 zero=1 microbatches=2", ["optimizer.name=sgd", "optimizer.momentum=0.9"], []),
    ("bert", "pp=2 dp=2 zero=2 microbatches=2", [], ["communication.overlap=none"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "settings", "rank_settings"),
    [FEATURES[0], *(pytest.param(*each, marks=pytest.mark.proof) for each in FEATURES[1:])],
)
def test_other_features_train_as_on_one_device(
    ranks: Ranks, folder: Path, model: str, layout: str, settings: list[str], rank_settings: list[str]
) -> None:
    expected = alone(folder, model, 0.0, True, *settings)
    words = [f"layout.{word}" for word in layout.split()]
    job = job_of_model(folder, model, *words, *settings, *rank_settings, tied=True)
    sizes = dict(word.split("=") for word in layout.split())
    world = int(sizes["pp"]) * int(sizes.get("tp", 1)) * int(sizes.get("dp", 1))
    found, *_ = ranks.run(world, train_and_reassemble, job, timeout_s=120)
    assert found is not None and worst_difference(found, expected) < TOLERANCE


UNUSUAL = [  # (model, layout); `make test` takes the first
    ("LayersUsedTwice", "chunks=2 schedule=zb-v dp=2 zero=2"),
    ("LayersForFewRows", "chunks=2 schedule=interleaved dp=2 zero=2"),
    ("LayersUsedTwice", "schedule=1f1b dp=2 zero=2"),
    ("LayersUsedTwice", "chunks=2 schedule=zb-interleaved"),
    ("LayersUsedTwice", "chunks=2 schedule=zb-v dp=2 zero=3"),
    ("LayersUsedTwice", "schedule=gpipe dp=2"),
    ("LayersForFewRows", "chunks=2 schedule=breadth-first dp=2 zero=0"),
    ("LayersForFewRows", "chunks=2 schedule=zb-v dp=2 zero=1"),
    ("LayersForFewRows", "chunks=2 schedule=dualpipe-v dp=2 zero=2"),
]


@pytest.mark.parametrize(
    ("model", "words"), [UNUSUAL[0], *(pytest.param(*each, marks=pytest.mark.proof) for each in UNUSUAL[1:])]
)
def test_gradients_are_complete_when_they_are_reduced(ranks: Ranks, folder: Path, model: str, words: str) -> None:
    """Layers are used twice, or by few micro-batches. Buckets are small, so that many are reduced during backward."""
    settings = [f"model={{factory='train.trainable_user_models:{model}', vocab_size=260}}", "data.batch_sequences=24"]
    if "zero=3" not in words:
        settings += ["communication.bucket_mib=0.001", "communication.first_bucket_mib=0.001"]
    expected = train_and_reassemble(ALONE, small_job(folder, *settings))
    layout = [f"layout.{word}" for word in f"pp=2 microbatches=12 {words}".split()]
    found, *_ = ranks.run(
        4 if "dp" in words else 2, train_and_reassemble, small_job(folder, *settings, *layout), timeout_s=120
    )
    assert found is not None and expected is not None and worst_difference(found, expected) < TOLERANCE


BFLOAT16 = [
    case_of("llama", "zb-v", 2, 4, False, 0.0),  # A rank without the embedding, in whose dtype rotary tables are made
    case_of("t5", "interleaved", 2, 4, True, 0.0),
    case_of("gpt2", "1f1b", 2, 4, True, 0.0, data="dp=2 zero=2"),
    case_of("gemma2", "dualpipe-v", 2, 4, False, 0.0, data="dp=2 zero=3"),
]


@pytest.mark.proof
@pytest.mark.parametrize("case", BFLOAT16, ids=name_of)
def test_bfloat16_trains_within_its_rounding(ranks: Ranks, folder: Path, case: Case) -> None:
    """Losses and norms are near those of one device in float32."""
    expected = alone(folder, case["model"], case["dropout"], case["tied"], "precision.recipe=fp32")
    found = trained_on(ranks, folder, case, "precision.recipe=bf16")
    assert found.losses == pytest.approx(expected.losses, rel=0.02)
    assert found.norms == pytest.approx(expected.norms, rel=0.05)


# A micro-batch is a sequence.
SAME_BITS = [
    case_of("qwen2", "1f1b", 2, None, True, 0.1),
    case_of("decoder", "interleaved", 2, None, True, 0.0, data="dp=2 zero=3"),
    case_of("gpt2-like", "gpipe", 4, None, True, 0.1),
    case_of("decoder", "breadth-first", 2, None, True, 0.0, data="dp=2 zero=2"),
    case_of("decoder", "1f1b", 2, None, True, 0.0, data="dp=2 zero=0"),
]


@pytest.mark.parametrize(
    ("case", "steps"),
    [(SAME_BITS[0], 4), *(pytest.param(case, 50, marks=pytest.mark.proof) for case in SAME_BITS)],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_reproducible_runs_have_the_bits_of_one_rank(ranks: Ranks, folder: Path, case: Case, steps: int) -> None:
    changes = ("run.reproducible=layout", "precision.recipe=fp32")
    expected = alone(folder, case["model"], case["dropout"], case["tied"], *changes, steps=steps)
    found = trained_on(ranks, folder, case, *changes, steps=steps)
    assert not unlike(found, expected)


def test_schedules_that_split_backwards_are_not_reproducible(folder: Path) -> None:
    sentence = "layout.schedule = 'zb-v' adds up parts of the gradients of a micro-batch in.*; use layout.schedule=1f1b"
    settings = layout_settings(case_of("decoder", "zb-v", 2, None, True, 0.0))
    refused(sentence, job_of_model(folder, "decoder", "run.reproducible=layout", *settings).layout_for, 2)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_that_add_up_parts_of_a_gradient_are_not_reproducible(folder: Path, pp: int) -> None:
    job = job_of_model(folder, "t5", "run.reproducible=layout", f"layout.pp={pp}")
    sentence = "blocks of several stages read argument .* leave layout.pp or run.reproducible out"
    refused(sentence, sharding_of_job, job, job.layout_for(pp))
