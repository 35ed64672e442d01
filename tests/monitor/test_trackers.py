"""Values that TensorBoard reads back, and values that Weights & Biases receives."""

import io
import sys
from unittest.mock import Mock, call

import numpy as np
import pytest
from example_events import ended, evaluated, measured, started, step
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from motet.core.errors import InputError
from motet.monitor.events import TextSampled
from motet.monitor.sinks import TensorBoardSink, WandbSink


def board(folder, events):
    sink = TensorBoardSink(folder)
    for event in events:
        sink.on_event(event)
    sink.close()


def read(folder):
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_reads_back_what_was_told(tmp_path):
    steps = [step(1, mfu=0.5), step(2, mfu=0.25)]
    sample = TextSampled(step=2, prompt="a", text="b")
    board(tmp_path, [started(), *steps, evaluated(2, accuracy=0.75), sample, ended()])
    found = read(tmp_path)
    assert sorted(found.Tags()["scalars"]) == [
        *("memory/peak_bytes", "speed/mfu", "speed/step_time_s", "speed/tokens_per_s", "train/epoch"),
        *("train/learning_rate", "train/loss", "validation/accuracy", "validation/loss"),
    ]
    assert [(e.step, e.value, e.wall_time) for e in found.Scalars("train/loss")] == [(1, 7.5, 1002.0), (2, 6.5, 1004.0)]
    assert [e.value for e in found.Scalars("speed/mfu")] == [0.5, 0.25]
    assert [e.value for e in found.Scalars("validation/accuracy")] == [0.75]
    assert found.Tensors("sample/text_summary")[0].tensor_proto.string_val == [b"ab"]


def test_tensorboard_shows_a_resumed_step_once(tmp_path):
    board(tmp_path, [started(), step(1), step(2), step(3, loss=99.0)])
    board(tmp_path, [started(first_step=3), step(3), step(4)])
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")] == [(n, 8.5 - n) for n in range(1, 5)]


def test_tensorboard_shows_loads_of_experts_as_a_heat_map(tmp_path):
    board(tmp_path, [started(), measured(1, (6, 2, 2, 2), (3, 0, 3, 6)), step(1, balance_loss=0.25)])
    found = read(tmp_path)
    assert [e.value for e in found.Scalars("experts/max_over_mean")] == [2.0]
    assert [e.value for e in found.Scalars("train/balance_loss")] == [0.25]
    (image,) = found.Images("experts/load")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("L"))
    assert pixels.shape == (16, 32) and pixels[::8, ::8].tolist() == [[255, 85, 85, 85], [128, 0, 128, 255]]


def test_a_board_that_saw_no_event_closes(tmp_path):
    TensorBoardSink(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def fake_wandb(problem=None):
    """The four names of wandb that are used."""
    return Mock(spec=["Settings", "init"], init=Mock(side_effect=problem, return_value=Mock(spec=["log", "finish"])))


def test_wandb_gets_the_same_names(tmp_path, monkeypatch):
    fake = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink(tmp_path / "tiny-001", "voices", "offline", {"run": {"steps": 4}})
    for event in (started(), step(1), evaluated(1), ended()):
        sink.on_event(event)
    sink.close()
    given, run = fake.init.call_args.kwargs, fake.init.return_value
    assert (given["project"], given["mode"], given["group"]) == ("voices", "offline", "tiny-001")
    assert given["config"] == {"run": {"steps": 4}}
    first, second = run.log.call_args_list
    assert (first.kwargs, first.args[0]["train/loss"]) == ({"step": 1}, 7.5)
    assert second == call({"validation/loss": 5.0}, step=1) and run.finish.call_count == 1


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (None, r"'online' needs the package wandb.*pip install 'motet\[wandb\]'.*wandb=off"),
        (fake_wandb(RuntimeError("no key")), r"does not start: no key; use monitor\.wandb=offline"),
    ],
)
def test_wandb_that_is_not_installed_or_does_not_start_is_a_sentence(tmp_path, monkeypatch, module, sentence):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(InputError, match=sentence):
        WandbSink(tmp_path, "voices", "online", {})
