"""Events of made-up runs, for the tests of this package."""

from motet.monitor.events import EvaluationDone, ExpertsMeasured, RoutedLayerLoads, RunEnded, RunStarted, StepDone


def started(**changes):
    values = {"name": "tiny", "ranks": 2, "threads": 1, "device": "a CPU", "parameters": 4_212_736, "data": "d1"}
    return RunStarted(**{**values, "last_step": 4, "num_classes": 4096, "time": 1000.0, **changes})


def step(number, **changes):
    values = {"step": number, "time": 1000.0 + 2 * number, "loss": 8.5 - number, "learning_rate": 1e-3}
    counts = {"target_tokens": 90.0, "tokens": 100, "memory_bytes": 1024**3}
    return StepDone(**{**values, **counts, "step_time_s": 0.5, "tokens_per_s": 200.0, **changes})


def evaluated(number, **changes):
    return EvaluationDone(**{"step": number, "split": "validation", "loss": 5.0, "targets": 10.0, **changes})


def measured(number, *loads, dropped=0):
    """The experts of layers `a`, `b` and so on; two layers by default."""
    layers = [
        RoutedLayerLoads(
            name=chr(97 + i), loads=each, max_over_mean=max(each) * len(each) / sum(each), dropped=dropped, entropy=0.5
        )
        for i, each in enumerate(loads or [(3, 1), (2, 2)])
    ]
    return ExpertsMeasured(step=number, layers=tuple(layers), time=1000.0 + 2 * number)


def ended(**changes):
    return RunEnded(**{"reason": "finished", "steps": 4, **changes})


def whole_run():
    return [started(), *(step(number) for number in range(1, 5)), evaluated(4, perplexity=148.4), ended()]
