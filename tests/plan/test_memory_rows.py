"""Readers of published memory: what names and notes of rows say about a run; and predictions held to the rows."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from planner.memory_rows import COLUMNS
from planner.published_files import read_published_file
from planner.published_rows import STEP_COLUMNS
from planner.row_models import model_of_row

from motet.models.spec.block_costs import DecoderVariant, PublishedDecoderSettings
from motet.plan.memory.step_memory import estimate_memory
from motet.plan.validation.predictions import fit_report, memory_report
from motet.plan.validation.step_rows import MeasuredStep

FOLDER = Path(__file__).parents[3] / "shared" / "validation"
SMALL = {
    "id": "1",
    "platform": "h100",
    "test": "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist",
    "nodes": "1",
    "gpus_per_node": "8",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "seq": "1024",
    "micro_batch": "4",
    "global_batch": "32",
    "bf16_fp16": "bf16",
    "dist_optimizer": "1",
    "peak_alloc_GiB_last_rank": "2.5",
}
STEP = {
    "id": "1",
    "source": "NVIDIA/Megatron-LM examples",
    "model": "gpt-1B",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "vocab": "50257",
    "seq": "1024",
    "gpu": "H100-SXM-80GB",
    "gpus": "8",
    "micro_batch": "1",
    "global_batch": "32",
    "precision": "bf16",
    "quality": "A",
    "outcome": "ok",
}


def read(folder: Path, values: dict[str, str], columns: tuple[str, ...]) -> MeasuredStep:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerow(values)
    file = read_published_file(path)
    assert not file.skipped, file.skipped
    return file.rows[0]


@pytest.mark.parametrize(
    ("values", "stack", "has_dropout"),
    [
        ({}, "megatron", True),
        ({"test": "gpt/gpt3_mcore_te_tp1_pp1"}, "megatron-unfused", True),
        ({"test": "gpt/gpt3_mcore_tp1_pp1_resume_torch"}, "megatron-unfused", True),
        ({"test": "gpt/gpt3_mcore_te_tp1_pp1_cp2", "cp": "2"}, "megatron", False),
        ({"test": "moe/gpt3_memory_speed", "mla": "1"}, "megatron-unfused", False),
        ({"test": "moe/gpt3_fine_grained_offloading", "mla": "1"}, "megatron", False),
        ({"test": "gpt/gpt3_weekly_cp2", "cp": "2", "fp8": "hybrid"}, "megatron", True),
    ],
)
def test_attention_and_dropout_of_tests(tmp_path: Path, values: dict[str, str], stack: str, has_dropout: bool) -> None:
    step = read(tmp_path, SMALL | values, COLUMNS).step
    assert (step.stack.name, step.has_dropout) == (stack, has_dropout)


@pytest.mark.parametrize(
    ("source", "notes", "stack", "memory"),
    [
        ("torchtitan/a_202412.md", "torch.compile", "torchtitan-compiled", "fsdp"),
        ("torchtitan/a_202506.md", "torch.compile", "torchtitan-compiled", "fsdp-fused-loss"),
        ("torchtitan/a_2025-06.md", "async TP; torch.compile", "torchtitan-async-tp", "fsdp-fused-loss"),
        ("torchtitan/a_202506.md", "eager", "torchtitan-eager", "fsdp-eager"),
    ],
)
def test_torchtitan_compiles_the_loss_since_2025(
    tmp_path: Path, source: str, notes: str, stack: str, memory: str
) -> None:
    chosen = read(tmp_path, STEP | {"source": source, "notes": notes}, STEP_COLUMNS).step.stack
    assert (chosen.name, chosen.memory) == (stack, memory)


def test_every_second_layer_of_gpt_oss_has_a_window() -> None:
    sizes = {"model": "gpt-oss 1B", "heads": "4", "experts": "8", "topk": "2", "moe_ffn": "512"}
    model = model_of_row(dict.fromkeys(STEP_COLUMNS, "") | STEP | sizes)
    assert isinstance(model, PublishedDecoderSettings) and model.sliding_window == 128 and model.head_dim == 64
    assert model.variant == DecoderVariant(attention_sinks=True, expert_biases=True, full_layers=(1, 3, 5, 7, 9, 11))


def test_names_of_tests_say_more(tmp_path: Path) -> None:
    instances = read(tmp_path, SMALL | {"test": "gpt/gpt3_te_multi_dist_optimizer_instances"}, COLUMNS).step
    assert instances.layout.sharding.shards == 4
    gated = read(tmp_path, SMALL | {"swiglu": "1"}, COLUMNS).step
    assert gated.model.ffn_hidden == 1344  # 8 / 3 of 512, cut to a multiple of 64
    normed = read(tmp_path, SMALL | {"test": "gpt/gpt3_te_qk_layernorm_resume"}, COLUMNS).step
    assert normed.model.query_key_norm and not gated.model.query_key_norm
    assert read(tmp_path, SMALL | {"mtp": "1"}, COLUMNS).step.extra_outputs == 1


@pytest.mark.parametrize(("tp", "padded"), [("", 50304), ("1", 50304), ("2", 50432), ("8", 51200)])
def test_vocabularies_are_padded_for_all_ranks_of_tensor_parallelism(tmp_path: Path, tp: str, padded: int) -> None:
    model = read(tmp_path, SMALL | {"tp": tp}, COLUMNS).step.model
    assert (model.vocab_size, model.experts) == (padded, None)


def test_a_row_of_an_unknown_platform_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows([SMALL, SMALL | {"platform": "abacus"}])
    rows, skipped, _ = read_published_file(path)
    reason = "row 1: platform 'abacus' is unknown; use one of gb200, h100, a100, b200, gb300"
    assert (len(rows), skipped) == (1, [(3, reason)])


def test_sources_and_notes_of_steps(tmp_path: Path) -> None:
    plain = read(tmp_path, STEP, STEP_COLUMNS).step
    assert (plain.recipe.reduce, plain.has_dropout, plain.extra_outputs) == ("float32", False, 0)
    nemo = read(tmp_path, STEP | {"source": "NVIDIA/NeMo docs/performance_summary.md"}, STEP_COLUMNS).step
    assert nemo.recipe.reduce == "bfloat16"
    ci = read(tmp_path, STEP | {"source": "NVIDIA/Megatron-LM tests/test_cases/gpt/x.json"}, STEP_COLUMNS).step
    assert ci.has_dropout
    notes = "UNFUSED attention, MTP 1 layer, router force-balanced"
    noted = read(tmp_path, STEP | {"notes": notes}, STEP_COLUMNS).step
    assert (noted.stack.name, noted.extra_outputs, noted.expert_imbalance) == ("megatron-unfused", 1, 1.0)
    assert plain.expert_imbalance > 1
    sharded = read(tmp_path, STEP | {"pp": "2", "shard": "fsdp (zero2-like: grad sharded)"}, STEP_COLUMNS).step
    gradients = estimate_memory(sharded).ranks[0].bytes["gradients"]
    whole = estimate_memory(replace(sharded, shards_gradient_sums=False)).ranks[0].bytes["gradients"]
    assert whole == 4 * gradients  # Over four ranks of data parallelism


def test_uneven_stages(tmp_path: Path) -> None:
    values = {"pp": "4", "layers": "13", "notes": "13 layers over 4 stages is uneven (4,..,4,1)"}
    step = read(tmp_path, STEP | values, STEP_COLUMNS).step
    assert [len(blocks) for blocks in step.stage_ranges] == [4, 4, 4, 1]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no published measurements in {FOLDER}")
def test_published_memory_is_met() -> None:
    rows, small_rows = (read_published_file(FOLDER / name).rows for name in ("steps.csv", "memory_small_models.csv"))
    report, small = memory_report(rows), memory_report(small_rows)
    assert (report["rows"], small["rows"]) == (17, 94)
    assert report["mape"] <= 0.03 and report["quality"]["B"]["mape"] <= 0.06 and small["mape"] <= 0.06
    assert fit_report(rows)["wrong"] <= 3
