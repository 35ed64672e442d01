"""`motet show model`, `layout`, `pipeline`, `dtype` and `precision`: what is printed, the JSON, and what is refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from motet.cli.show.show_commands import show_app as app
from motet.core.errors import InputError
from motet.data.samples.packing import span_corruption_lengths
from motet.monitor import stdout_stderr
from motet.parallel.layout import parse_layout, resolve_layout
from motet.parallel.pipeline.schedule_drawing import draw_text
from motet.parallel.pipeline.schedule_timeline import ScheduleTimeline
from motet.parallel.pipeline.schedules import make_schedule
from motet.parallel.step_plan.check import InvalidStepPlanError


def run(*arguments: str, command: str = "model") -> Result:
    stdout_stderr._make_console.cache_clear()  # a console keeps the width that it was made with
    try:
        return CliRunner().invoke(app, [command, *arguments], env={"COLUMNS": "400"})
    finally:
        stdout_stderr._make_console.cache_clear()


def shown(*arguments: str) -> str:
    result = run(*arguments, command="layout")
    assert result.exit_code == 0, result.output
    return result.output


def answer(*arguments: str, command: str = "model") -> dict[str, Any]:
    result = run(*arguments, "--json", command=command)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_names_blocks_and_totals() -> None:
    result = run("mixtral-8x7b")
    assert result.exit_code == 0
    rows = {line.partition("  ")[0]: line for line in result.output.partition("\n\n")[0].splitlines()[2:]}
    assert list(rows) == ["embedding", "expert block", "head", "model"]
    assert "32" in rows["expert block"] and "1,451,270,144" in rows["expert block"]
    assert "46,702,792,704" in rows["model"] and "A token goes through 12,879,925,248 parameters." in result.output


def test_a_dense_model_has_no_active_parameters_to_speak_of() -> None:
    assert "A token goes through" not in run("tiny").output


def test_json_adds_up() -> None:
    found = answer("llama3-8b")
    assert (found["sequence_length"], found["dtype"], found["attention"]) == (8192, "bfloat16", "causal")
    saved = ("saved_bytes_per_token", "saved_bytes_per_sequence")
    for key in ("parameters", "active_parameters", "training_flops_per_token", *saved):
        assert found[key] == sum(block[key] * block["repeat"] for block in found["blocks"])
    assert found["parameters"] == 8_030_261_248
    assert found["training_flops_per_token"] == 3 * found["forward_flops_per_token"]


def test_attention_and_length_are_choices() -> None:
    pairs = 32 * 4096 * 8192  # of one token, all layers and heads
    full = answer("llama3-8b", "--attention", "full")["training_flops_per_token"]
    short = answer("llama3-8b", "--sequence-length", "4096", "--attention", "full")["training_flops_per_token"]
    assert full - answer("llama3-8b")["training_flops_per_token"] == full - short == 6 * pairs


def test_settings_of_a_job_are_replaced() -> None:
    found = answer("tiny", "model.layers=2", "precision.recipe=fp32")
    assert (found["blocks"][1]["repeat"], found["dtype"]) == (2, "float32")


@pytest.mark.parametrize("form", ["{folder}", "hf:{folder}", "{folder}/config.json", "hf:{folder}/config.json"])
def test_a_config_is_shown_however_it_is_named(tmp_path: Path, form: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    found = answer(form.format(folder=tmp_path))
    assert (found["parameters"], found["sequence_length"]) == (124_439_808, 1024)


def test_a_config_is_trained_as_its_kind_is(tmp_path: Path) -> None:
    """An encoder-decoder on spans, whose source and targets both are tokens; an encoder on masked tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    targets = span_corruption_lengths(100, 0.15, 100).target_tokens
    assert answer(str(tmp_path), "--sequence-length", "100")["tokens_per_sequence"] == 100 + targets
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    head = answer(str(tmp_path), "--sequence-length", "100")["blocks"][-1]
    assert head["forward_flops_per_token"] == 2 * (768 * 768 + 768 * 30522) * 15 / 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama3-8b"], "did you mean 'llama3-8b'"),
        (["tiny", "--sequence-length", "257"], "model.context = 256"),
        (["hf:/nowhere"], "cannot read /nowhere"),
        (["hf:/nowhere", "model.layers=2"], "only jobs"),
    ],
)
def test_what_cannot_be_shown_is_told(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, InputError) and words in str(result.exception)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom motet.cli.show.show_commands import show_app as app\n"
        "assert CliRunner().invoke(app, ['model', 'tiny']).exit_code == 0\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- layout ----------------------------------------------------------------------------------------
def test_it_says_who_does_what_and_that_it_is_proven() -> None:
    text = shown("dp=8 zero=3 shard_group=4", "communication.all_reduce=ring")
    assert "is in one shard of 2 copies, for whose update 8 ranks x 1 micro-batch add their gradients" in text
    assert "each of 16 rows is read once" in text and "Proven, too: all-reduce/ring of 2 ranks." in text


Rows = list[tuple[str, str, str, str]]
SHARDS, REPLICAS, PAIRS = "0 1 2 3 | 4 5 6 7", "0 4 | 1 5 | 2 6 | 3 7", "0 1 | 2 3 | 4 5 | 6 7"
SUMS = [
    ("micro-batch, overlaps", "reduce-scatter", "gradients", SHARDS),
    ("last micro-batch, overlaps", "all-reduce", "gradients", REPLICAS),
]
NORM = [("step", "norm", "gradients", "0 1 2 3"), ("step", "update", "gradients", SHARDS)]


@pytest.mark.parametrize(
    ("layout", "setting", "actions"),
    [
        ("zero=0", "overlap=none", [
            ("last micro-batch", "all-reduce", "gradients", "0 1 2 3 4 5 6 7"),
            ("step", "norm", "gradients", "0"), ("step", "update", "gradients", "0 | 1 | 2 | 3 | ..."),
        ]),
        ("zero=0", "overlap=forward", [
            ("last micro-batch, overlaps", "reduce-scatter", "gradients", "0 1 2 3 4 5 6 7"),
            ("step", "norm", "gradients", "0 1 2 3 4 5 6 7"),
            ("step, overlaps", "all-gather", "gradients", "0 1 2 3 4 5 6 7"),
            ("step", "update", "gradients", "0 | 1 | 2 | 3 | ..."),
        ]),
        ("zero=1 shard_group=4", "overlap=none", [
            ("last micro-batch", "reduce-scatter", "gradients", SHARDS),
            ("last micro-batch", "all-reduce", "gradients", REPLICAS),
            *NORM, ("step", "all-gather", "parameters", SHARDS),
        ]),
        ("zero=2 shard_group=4", "overlap=forward", [
            *SUMS, *NORM, ("step, overlaps", "all-gather", "parameters", SHARDS),
        ]),
        ("zero=3 shard_group=4 reshard_after_forward=false", "all_gather=backend", [
            ("forward, overlaps", "all-gather", "parameters", SHARDS), *SUMS, *NORM,
        ]),
        ("zero=3 shard_group=4 secondary_group=2", "all_gather=backend", [
            ("forward, overlaps", "all-gather", "parameters", SHARDS),
            ("backward", "keep-secondary", "parameters", PAIRS),
            ("backward, overlaps", "all-gather", "parameters", PAIRS), *SUMS, *NORM,
        ]),
    ],
)  # fmt: skip
def test_it_shows_the_actions_of_a_step_in_order(layout: str, setting: str, actions: Rows) -> None:
    assert action_rows(f"dp=8 {layout}", f"communication.{setting}") == actions


def action_rows(*arguments: str) -> Rows:
    lines = shown(*arguments).partition("the actions of a step")[2].partition("\n\n")[0].splitlines()[2:]
    return [
        (moment, action, tensor, ranks) for moment, action, tensor, ranks, _ in (re.split("  +", row) for row in lines)
    ]


def test_with_more_dimensions_ranks_are_those_of_the_world() -> None:
    words = "dp=2 tp=2 zero=1"
    assert "the actions of a step of dp 2 x tp 2" in shown(words, *SMALL)
    rows = action_rows(words, *SMALL)
    assert {ranks for _, action, _, ranks in rows if action == "reduce-scatter"} == {"0 2 | 1 3"}
    assert {ranks for _, action, _, ranks in rows if action == "norm"} == {"0 2 | 1 3"}
    found = answer(words, *SMALL, command="layout")
    assert found["dims"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    assert [rank["rows"] for rank in found["ranks"]] == [[[0, 8]], [[0, 8]], [[8, 16]], [[8, 16]]]


SMALL = [
    *("model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48"),
    *("model.vocab_size=64", "data.sequence_length=32"),
]


def roles(*arguments: str) -> dict[str, dict[str, Any]]:
    found = answer(*arguments, "--roles", command="layout")
    return {tensor["name"]: tensor for tensor in found["tensors"]} | {"": found["repeated"]}


def test_it_shows_the_role_of_each_tensor() -> None:
    found = roles("tp=2", *SMALL)
    qkv, down = found["blocks.{i}.attention.qkv.weight"], found["blocks.{i}.ffn.down.weight"]
    assert (qkv["split"], qkv["count"], qkv["shape"], qkv["local_shape"]) == ("columns", 2, [64, 32], [32, 32])
    assert (down["split"], down["count"], down["shape"], down["local_shape"]) == ("rows", 2, [32, 48], [32, 24])
    assert found["norm.weight"]["split"] == "whole" and found["norm.weight"]["partial_over"] == []
    text = shown("tp=2 dp=4 sp=true", "--roles", *SMALL)
    (line,) = (each for each in text.splitlines() if each.startswith("blocks.{i}.ffn_norm.weight"))
    assert line.split()[:8] == ["blocks.{i}.ffn_norm.weight", "2", "32", "whole", "32", "dp", "tp", "whole;"]
    assert "tiny, dp 4 x tp 2: how ranks split the parameters" in text and "Left whole, " in text


def test_what_a_degree_does_not_divide_is_whole_and_warned_of() -> None:
    found = roles("tp=3", *SMALL)
    attention, feed_forward = found["blocks.{i}.attention.qkv.weight"], found["blocks.{i}.ffn.up.weight"]
    assert (attention["split"], feed_forward["split"]) == ("whole", "columns") and "tp = 3" in attention["reason"]
    products = 2 * (64 * 32 + 32 * 32), 2 * 3 * 48 * 32, 64 * 32
    repeated = products[0] + (products[2] if found["embedding.weight"]["split"] == "whole" else 0)
    assert found[""]["products"] == pytest.approx(repeated / sum(products), rel=1e-12)
    text = shown("dp=1 tp=3", *SMALL)
    (warning,) = (line for line in text.splitlines() if line.startswith("layout.tp = 3 leaves layers whole: "))
    assert "blocks.{i}.attention.qkv.weight and 1 more (" in warning
    assert "% of the FLOPs of products with weights." in warning


def test_a_rule_of_the_job_is_the_reason() -> None:
    found = roles("tp=2", "layout.rules.*.up=rows", "layout.rules.blocks.1.attention.*=whole", *SMALL)
    assert (found["blocks.{i}.ffn.up.weight"]["split"], found["blocks.{i}.ffn.down.weight"]["split"]) == (
        "rows",
        "whole",
    )
    qkv = found["blocks.1.attention.qkv.weight"]
    assert (qkv["split"], qkv["reason"]) == ("whole", "a rule of the job")
    assert found["blocks.0.attention.qkv.weight"]["split"] == "columns"


def test_it_shows_the_bytes_of_activations() -> None:
    activation, tokens = 8 * 32 * 32 * 4, 8 * 32
    found = answer("dp=2 tp=2 microbatches=1", *SMALL, command="layout")["sent_activation_bytes_of_first_rank"]
    block_bytes = 2 * 4 * activation
    vocabulary_bytes = 2 * activation + 3 * 4 * tokens
    assert found["all_reduce"] in (block_bytes, block_bytes + vocabulary_bytes)
    assert "For activations of split layers it sends " in shown("dp=2 tp=2", *SMALL)
    events = answer("tiny", "layout.tp=2", *SMALL, "--ranks", "2", "--cluster", "h100", command="step")["events"]
    exchanges = [event["name"] for event in events if event["kind"] == "exchange"]
    ways = (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    blocks = [f"tensor parallelism of {way} block {i}" for way, i in ways]
    assert [name for name in exchanges if "block" in name] == blocks
    assert {event["stream"] for event in events if event["kind"] == "exchange"} == {"network"}


STEP = ("tiny", "--ranks", "4", "--cluster", "h100")


def test_a_step_is_drawn_in_seconds(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    found = answer(*STEP, "layout.zero=2", "--svg", str(picture), command="step")
    kinds = {event["kind"] for event in found["events"]}
    assert kinds == {"forward", "backward", "reduce", "norm", "update", "gather", "host"}
    assert sum(found["time_s"].values()) == pytest.approx(found["step_time_s"])
    host = next(event for event in found["events"] if event["kind"] == "host")
    assert host["stop_s"] == pytest.approx(found["step_time_s"])
    drawn = ElementTree.fromstring(picture.read_text()).iter("{http://www.w3.org/2000/svg}rect")
    assert sum("box" in box.get("class", "") for box in drawn) == len(found["events"])
    text = run(*STEP, command="step").output
    assert "network  all-reduce bucket 0" in text and "a step takes 8" in text  # With compiled blocks
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["compute", "network"]


def test_the_layout_of_a_step_may_be_another_than_the_jobs() -> None:
    words = "pp=2 tp=2 zero=1 microbatches=4 recompute=full"
    found = answer(*STEP, "--layout", words, command="step")
    assert {event["rank"] for event in found["events"]} == {0, 2}  # One of each stage
    assert {"message", "exchange", "recomputation"} < {event["kind"] for event in found["events"]}
    last = answer(*STEP, "--layout", words, "--rank", "3", command="step")
    assert last["events"] == [event for event in found["events"] if event["rank"] == 2]
    rows = run(*STEP, "--layout", words, command="step").output.splitlines()[3:7]
    assert [row.split()[:3] for row in rows] == [["rank", n, stream] for n in "02" for stream in ("compute", "network")]
    planned = answer(*STEP, "layout.pp=2", "layout.tp=2", "layout.zero=1", command="step")
    assert planned["layout"].startswith("dp=1 zero=1 tp=2 pp=2 ") and " stages=" in planned["layout"]


def test_hosts_are_those_of_the_cluster() -> None:
    settings = [*SMALL, "communication.cluster=two-hosts-200mbit"]
    assert "lie on several hosts of 2 devices" in shown("dp=1 tp=4", *settings)
    assert "lie on several hosts" not in shown("dp=2 tp=2", *settings)


def test_its_json_has_what_each_rank_updates_and_reads() -> None:
    found = answer("dp=4 zero=1 microbatches=2", command="layout")
    layout = resolve_layout(parse_layout("zero=1 microbatches=2"), 4, 16)
    assert sum(rank["updated_elements"] for rank in found["ranks"]) == found["proof"]["elements"]
    assert found["ranks"][3]["rows"] == [[12, 14], [14, 16]]
    groups = [list(ranks) for ranks in layout.sharding.shard_groups]
    first = {"kind": "reduce_scatter", "moment": "last_microbatch", "tensor": "gradients", "overlaps": True}
    assert found["schedule"][0] == first | {"rank_groups": groups, "units": ["bucket 0", "bucket 1"]}
    placement = {"parameters": "replicated", "gradients": "replicated", "optimizer_states": "sharded"}
    assert found["state_placement"] == placement


def test_replicas_that_train_apart_and_owners_are_told() -> None:
    assert "Replicas take an outer step over ranks 0 2 | 1 3." in shown("dp=4 zero=2 shard_group=2", "outer.every=5")
    owners = shown("dp=4 data=parameter_server server.transport=collectives server.count=2")
    assert "broadcast/tree of 4 ranks" in owners
    kinds = [row[1] for row in action_rows("dp=4 data=parameter_server server.transport=collectives")]
    assert kinds == ["reduce", "norm", "update", "broadcast"]


def test_of_many_ranks_the_first_are_shown() -> None:
    text = shown("dp=64", "data.batch_sequences=64")
    assert "48 more" in text and "  0 1 2 3 4 5 6 7 ..." in text


def test_what_is_not_right_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: object) -> None:
        raise InvalidStepPlanError("nobody updates element 0 of w")

    monkeypatch.setattr("motet.cli.show.layout_report.prove_step_plan", wrong)
    assert isinstance(run("dp=2", command="layout").exception, AssertionError)


def test_a_pipeline_is_a_grid_with_its_costs() -> None:
    lines = run("--schedule", "1f1b", "--stages", "2", "--microbatches", "2", command="pipeline").output.splitlines()
    assert lines[0] == "1f1b: 2 ranks, 1 chunk, 2 micro-batches"
    assert lines[2:4] == ["rank 0  F0 F1       B0---    B1---", "rank 1     F0 B0--- F1 B1---"]
    assert lines[7:10] == [
        "rank   idle  activations  memory",
        "   0  33.3%            2       2",
        "   1  33.3%            1       1",
    ]
    assert lines[-1].startswith("durations F 1 B 2: idle 33.3% of the time; a rank holds up to 2 times the activations")


def test_a_grid_is_folded_to_the_width_of_a_terminal() -> None:
    lines = draw_text(ScheduleTimeline(make_schedule("zb-v", 2, chunks=2, microbatches=8)), 60)
    assert max(map(len, lines)) <= 60 and len(lines) % 3 == 0 and len(lines) > 6
    whole = draw_text(ScheduleTimeline(make_schedule("zb-v", 2, chunks=2, microbatches=8)))
    assert "".join(line[8:].ljust(52) for line in lines[::3]).rstrip() == whole[0][8:]


def test_a_grid_without_room_has_no_numbers() -> None:
    timeline = ScheduleTimeline(make_schedule("1f1b", 2, chunks=1, microbatches=400))
    rows = draw_text(timeline)
    assert 1200 < len(rows[0]) <= 1208 and not re.search(r"\d", rows[0][8:])


def test_the_json_of_a_pipeline_has_times_and_costs() -> None:
    report = answer("--schedule", "zb-v", "--stages", "4", "--microbatches", "8", command="pipeline")
    assert report["stage_ranks"] == [0, 1, 2, 3, 3, 2, 1, 0] and report["end"] == 51
    assert report["bubble_share"] == pytest.approx(3 / 51) and report["bytes_factor"] == 2
    assert [rank["memory"] for rank in report["ranks"]] == [4, 4, 4, 4]
    first = report["ranks"][0]
    assert first["actions"][:2] == ["0F0", "0SEND_F0"] and first["times"][0] == [0, 1]
    slow = answer("--schedule", "zb-v", "--durations", "W=2, M=0.5", command="pipeline")
    assert slow["durations"] == {"F": 1, "B": 2, "I": 1, "W": 2, "M": 0.5} and slow["end"] > 16 * 4


def test_a_pipeline_is_drawn_and_written_to_files(tmp_path: Path) -> None:
    svg, csv = tmp_path / "p.svg", tmp_path / "p.csv"
    result = run("--schedule", "dualpipe-v", "--svg", str(svg), "--csv", str(csv), command="pipeline")
    assert result.output.splitlines() == [f"{svg} is written", f"{csv} is written"]
    picture = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    boxes = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert boxes.count("backward, stage 7, micro-batch 5") == 1 and len(set(boxes)) == len(boxes)
    again = answer("--schedule", str(csv), command="pipeline")
    assert again["ranks"] == answer("--schedule", "dualpipe-v", command="pipeline")["ranks"]


def test_no_title_of_a_pipeline_is_html(tmp_path: Path) -> None:
    path = tmp_path / "a<b>&.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8")
    assert run("--schedule", str(path), "--svg", str(tmp_path / "p.svg"), command="pipeline").exit_code == 0
    ElementTree.fromstring((tmp_path / "p.svg").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--durations", "F=0"],
            r"--durations F=0: 'F=0' is not a duration; write KIND=NUMBER .* F, B, I, W, M, such as",
        ),
        (["--durations", "F=1,X=2"], r"'X=2' is not a duration"),
        (["--durations", "F=1,B=3,F=2"], r"^--durations F=1,B=3,F=2: F has two durations; write each kind once$"),
        (["--durations", "F"], r"'F' is not a duration"),
        (["--durations", "F=nan"], r"'F=nan' is not a duration"),
        (["--durations", "B=inf"], r"'B=inf' is not a duration"),
        (["--durations", "M=-1"], r"'M=-1' is not a duration"),
        (["--schedule", "zb-v", "--chunks", "3"], r"schedule 'zb-v' has 2 chunks a rank, not 3; give 2$"),
        (["--schedule", "nothing.csv"], r"no schedule 'nothing.csv'; use one of gpipe, .*, dualpipe-v, or a file$"),
    ],
)
def test_a_pipeline_that_cannot_be_shown(arguments: list[str], sentence: str) -> None:
    error = run(*arguments, command="pipeline").exception
    assert isinstance(error, InputError) and re.search(sentence, str(error)), error


def test_formats_are_drawn_and_store_a_number() -> None:
    lines = run(command="dtype").output.splitlines()
    assert "FP16      16  S EEEEE MMMMMMMMMM" in lines and "E8M0       8  EEEEEEEE" in lines
    stored = {
        line.split()[0]: line.split() for line in run("--value", "0.3952", command="dtype").output.splitlines() if line
    }
    assert stored["FP16"][1:] == ["0.395264", "0.00016", "0", "01101", "1001010011"]
    assert [stored[name][1] for name in ("BF16", "E4M3", "E5M2")] == ["0.394531", "0.40625", "0.375"]
    report = answer("--value=-1e6", command="dtype")
    found = {each["name"]: each["stored"] for each in report["formats"]}
    assert found["FP16"]["value"] == "-Infinity" and found["FP16"]["saturated"] == -65504.0
    assert "cannot be stored" in run("--value", "nan", command="dtype").output
    assert "stored" not in answer(command="dtype")["formats"][0]


def test_bytes_per_parameter_of_all_recipes_and_of_a_job() -> None:
    rows = [line.split() for line in run(command="precision").output.splitlines()]
    assert ["bf16", "AdamW", "bfloat16", "float32", "float32", "2", "4", "4", "8", "18"] in rows
    text = run("tiny", "precision.recipe=bf16", "precision.reduce_dtype=bfloat16", command="precision").output
    assert "  bfloat16  2 bytes  sums of gradients over micro-batches and ranks" in text
    report = answer("tiny", command="precision")
    assert report["total_bytes"] == 16 * report["parameter_count"] and report["rows"][0]["bytes"]["moments"] == 8
    compact = answer("tiny", "precision.moment_dtype=8bit", command="precision")
    saved = (report["total_bytes"] - compact["total_bytes"]) / report["parameter_count"]
    assert 5.8 < saved < 8 - 2.03125  # Vectors keep moments of 32 bits
    assert "total_bytes" not in answer("tiny", 'model.frozen=["*"]', "model.adapters={rank=2}", command="precision")
