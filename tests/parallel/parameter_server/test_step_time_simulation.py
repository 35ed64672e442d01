"""Steps of a parameter server on links of a given rate: what can be said of them without simulating."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "parts"))

from parameter_server_simulation import (
    MESSAGE_BYTES,
    ParameterServerSimulation,
    ServerSimulationCosts,
    SimulatedParameterSlice,
)

STEPS, WORKERS, LAYERS, BYTES, RATE = 12, 3, 6, 6e6, 25e6
F, B = 0.02, 0.04
SYNC = ConsistencyPolicy(WORKERS, STEPS, WORKERS, 0)


def play(
    servers: int = 1,
    rule: ConsistencyPolicy = SYNC,
    by_need: bool = True,
    rate: float = RATE,
    slow: Callable[[int, int], float] = lambda worker, work_item: 1.0,
) -> ParameterServerSimulation:
    each = BYTES / LAYERS
    loads = [SimulatedParameterSlice(each, each, (f"s{layer % servers}",), layer) for layer in reversed(range(LAYERS))]
    setting = ServerSimulationCosts(rate, 1e-4, (F,) * LAYERS, (B,) * LAYERS, slowdown=slow)
    return ParameterServerSimulation(rule, loads, WORKERS, setting, by_need).run()


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_server_moves_twice_what_all_workers_have_of_it(servers: int) -> None:
    """2WP / servers."""
    found = play(servers)
    for server in range(servers):
        moved = (found.bytes_in[f"s{server}"] + found.bytes_out[f"s{server}"]) / STEPS
        assert 0 <= moved - 2 * WORKERS * BYTES / servers < 100 * MESSAGE_BYTES


def test_without_waiting_a_step_is_its_computing() -> None:
    assert play(rate=1e15).seconds_per_step() == pytest.approx(LAYERS * (F + B), rel=0.01)


def test_a_slow_link_takes_as_long_as_its_bytes() -> None:
    """All pushes before the first update, and all pulls after it; computing runs beside."""
    assert play(rate=RATE / 100).seconds_per_step() == pytest.approx(200 * WORKERS * BYTES / RATE, rel=0.03)


def test_what_is_needed_first_comes_first() -> None:
    assert play(2).seconds_per_step() < 0.97 * play(2, by_need=False).seconds_per_step()


def test_who_waits_for_a_slow_worker() -> None:
    """Synchronous training takes as long as the slowest; the other modes do not."""

    def slow(worker: int, work_item: int) -> float:
        return 4.0 if worker == 0 else 1.0

    def seconds(rule: ConsistencyPolicy) -> float:
        return play(rule=rule, rate=1e15, slow=slow).seconds_per_step()

    assert seconds(SYNC) == pytest.approx(4 * LAYERS * (F + B), rel=0.01)
    assert seconds(ConsistencyPolicy(WORKERS, STEPS, 2, 0)) == pytest.approx(LAYERS * (F + B), rel=0.05)
    for rule in (
        ConsistencyPolicy(WORKERS, STEPS, 1, 3, has_per_item_updates=True),
        ConsistencyPolicy(WORKERS, STEPS, 1, None, has_per_item_updates=True),
    ):
        assert LAYERS * (F + B) < seconds(rule) < 1.7 * LAYERS * (F + B)
