"""Targets with a fault each, for the tests of the fuzzer."""

import os
import threading
import warnings
from typing import Any

from fuzzing.cases import FuzzCase, FuzzTarget, Outcome, check_equal

from motet.core.errors import InputError


class PlantedTarget(FuzzTarget):
    """Refuses even cases and accepts odd ones, but for case 5, in which `fault` happens."""

    name = "planted"
    first_check = "the number is even"
    first_refusals = "is even"

    def run(self, case: FuzzCase) -> Outcome | None:
        case.note(f"number {case.number}")
        if case.number == 5:
            self.fault()
        if case.number % 2 == 0:
            raise InputError(f"the number {case.number} is even; give an odd one")
        return None

    def fault(self) -> Any:
        """Do nothing wrong."""


class ExitTarget(PlantedTarget):
    def fault(self) -> Any:
        os._exit(3)


class RaisingTarget(PlantedTarget):
    def fault(self) -> Any:
        raise ValueError("not for users")


class ThreadTarget(PlantedTarget):
    def fault(self) -> Any:
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()


class WarningTarget(PlantedTarget):
    def fault(self) -> Any:
        warnings.warn("look out", RuntimeWarning, stacklevel=1)


class CanaryTarget(PlantedTarget):
    def fault(self) -> Any:
        self.canary.touch()


class WrongTarget(PlantedTarget):
    def fault(self) -> Any:
        check_equal("a tensor", [1, 2], [1, 3])


class ProseTarget(PlantedTarget):
    def fault(self) -> Any:
        raise InputError("cannot read it:\nTraceback (most recent call last)")


class EndlessTarget(PlantedTarget):
    def fault(self) -> Any:
        while True:
            pass


class GreedyTarget(PlantedTarget):
    extra_bytes = 1 << 28

    def fault(self) -> Any:
        return bytearray(1 << 30)


class QuittingTarget(PlantedTarget):
    def fault(self) -> Any:
        raise SystemExit(1)
