"""The clock of a device, with stand-ins for CUDA's events: there is no device here."""

import time
from typing import ClassVar

import torch

from motet.cluster.device_clock import DeviceClock
from motet.parallel.pipeline.player import ComputeClock


class Event:
    """Each event that is recorded comes 250 ms of the device after the one before."""

    recorded = 0
    waits: ClassVar[list[int]] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.number = Event.recorded

    def synchronize(self):
        Event.waits.append(self.number)

    def elapsed_time(self, other):
        assert other.number in Event.waits, "the device may not have reached it yet"
        return 250.0 * (other.number - self.number)


def test_a_cuda_device_is_timed_by_events_and_waited_for_when_the_time_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "waits", [])
    clock = ComputeClock(torch.device("cuda"))
    for _ in range(2):
        with clock.timed():
            pass
    assert Event.waits == []
    assert clock.total_s == 0.5 and Event.recorded == 4


def test_elsewhere_the_time_is_that_of_the_host():
    clock = DeviceClock(torch.device("cpu"))
    start = clock.now()
    time.sleep(0.02)
    stop = clock.now()
    clock.wait(stop)
    assert clock.seconds(start, stop) >= 0.02
