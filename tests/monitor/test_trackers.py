"""Values that TensorBoard reads back, and values that Weights & Biases receives."""

import sys
from types import SimpleNamespace

import pytest
from example_events import ended, evaluated, started, step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from motet.core.errors import InputError
from motet.monitor.events import TextSampled
from motet.monitor.trackers import TensorBoardSink, WandbSink


def board(folder, events):
    sink = TensorBoardSink(folder)
    for event in events:
        sink.on_event(event)
    sink.close()


def read(folder):
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


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


def test_a_board_that_saw_no_event_closes(tmp_path):
    TensorBoardSink(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


class FakeWandb(SimpleNamespace):
    """The four names of wandb that are used."""

    def __init__(self, problem=None):
        self.logged, self.given, self.finished, self.problem = [], None, 0, problem

    def Settings(self, **values):  # noqa: N802
        return values

    def init(self, **given):
        if self.problem:
            raise self.problem
        self.given = given
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_wandb_gets_the_same_names(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink(tmp_path / "tiny-001", "voices", "offline", {"run": {"steps": 4}})
    for event in (started(), step(1), evaluated(1), ended()):
        sink.on_event(event)
    sink.close()
    assert (fake.given["project"], fake.given["mode"], fake.given["group"]) == ("voices", "offline", "tiny-001")
    assert fake.given["config"] == {"run": {"steps": 4}}
    assert (fake.logged[0][0], fake.logged[0][1]["train/loss"]) == (1, 7.5)
    assert fake.logged[1] == (1, {"validation/loss": 5.0}) and fake.finished == 1


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (None, r"'online' needs the package wandb.*pip install 'motet\[wandb\]'.*wandb=off"),
        (FakeWandb(RuntimeError("no key")), r"does not start: no key; use monitor\.wandb=offline"),
    ],
)
def test_wandb_that_is_not_installed_or_does_not_start_is_a_sentence(tmp_path, monkeypatch, module, sentence):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(InputError, match=sentence):
        WandbSink(tmp_path, "voices", "online", {})
