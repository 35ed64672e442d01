"""The protocol of the parameter server, in every interleaving of small systems; and what is found when it is wrong."""

from dataclasses import replace

import pytest

from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper
from motet.parallel.server.protocol import Done, Pull, Push, Rule, Sent, View
from server.explore import System, explore


class AsksOnce(Client):
    """What was lost with a connection is not said again."""

    def resume(self, peer: str) -> Sent:
        return []


class AcknowledgesAtOnce(Keeper):
    def _copy(self, piece: int, share: int, pushes: frozenset[Push]) -> Sent:
        return self._acks(pushes) + super()._copy(piece, share, pushes)


class AnswersAnyPull(Keeper):
    def _pull(self, pull: Pull) -> Sent:
        return super()._pull(pull._replace(least=0))


class ForgetsTheSum(Keeper):
    """A server that becomes the first of a piece does not tell the norm that the one before it owed."""

    def _look(self, view: View) -> Sent:
        closing, self.closing = self.closing, None
        sent = super()._look(view)
        self.closing = closing
        return sent


class CountsTwice(Desk):
    def _finish(self, done: Done) -> None:
        super()._finish(done)
        if self.settled.has(done.share) and done.worker not in self.current:
            self.done[done.share] = done.report


class ForgetsWorkers(Desk):
    def _lose(self, name: str) -> Sent:
        sent = super()._lose(name)
        self.again.clear()
        return sent


class BelievesTheLost(Desk):
    """It takes a share for done whose pushes were lost since."""

    def _finish(self, done: Done) -> None:
        super()._finish(done._replace(epoch=self.view.epoch))


class WaitsForOld(Client):
    """It does not ask the server again that took the place of a lost one."""

    def _look(self, view: View) -> Sent:
        self.view = view
        return []


SYNC, BOUNDED, FIRST, ALONE = Rule(2, 2, 2, 0), Rule(2, 2, 2, 1), Rule(2, 2, 1, 0), Rule(2, 2, 1, None, alone=True)
RULES = {"sync": SYNC, "bounded": BOUNDED, "first-k": FIRST, "async": ALONE}

SMALL = {
    "two steps": System(SYNC, 2, 1),
    "pieces with two servers": System(SYNC._replace(steps=1), 2, 2, copies=2),
    "a message twice": System(SYNC._replace(steps=1), 2, 1, doubles=1),
    "a lost connection": System(SYNC._replace(steps=1), 2, 1, cuts=1),
    "an end": System(SYNC, 2, 1, crashes=1),
    "a server that returns": System(SYNC._replace(steps=1), 1, 2, crashes=1, returns=True),
    "values read in parts": System(SYNC, 2, 1, in_parts=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("system", SMALL)
def test_promises_are_kept(system: str, rule: str) -> None:
    small, asked = SMALL[system], RULES[rule]
    shares = small.workers
    found = explore(
        replace(small, rule=asked._replace(shares=shares, closes=min(asked.closes, shares), steps=small.rule.steps))
    )
    assert found.ends and found.states > 100


@pytest.mark.proof
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "system",
    [
        System(SYNC, 2, 2, copies=2, doubles=1, crashes=1),
        System(SYNC, 2, 2, copies=2, crashes=1, returns=True),
        System(SYNC, 2, 2, crashes=1, returns=True),
        System(SYNC, 2, 2, copies=2, cuts=1),
    ],
    ids=["twice and an end", "a second returns", "a server returns", "a lost connection"],
)
def test_promises_are_kept_by_larger_systems(system: System, rule: str) -> None:
    assert explore(replace(system, rule=RULES[rule]._replace(steps=1))).ends


WRONG = {
    "acknowledges at once": System(SYNC, 2, 2, 2, crashes=1, keeper=AcknowledgesAtOnce),
    "answers any pull": System(SYNC, 2, 2, keeper=AnswersAnyPull),
    "forgets the sum": System(SYNC, 2, 2, 2, crashes=1, keeper=ForgetsTheSum),
    "counts twice": System(Rule(1, 2, 1, None, alone=True), 2, 1, doubles=1, desk=CountsTwice),
    "forgets workers": System(SYNC, 2, 2, crashes=1, desk=ForgetsWorkers),
    "believes the lost": System(Rule(1, 2, 1, 0), 1, 1, crashes=1, returns=True, desk=BelievesTheLost),
    "waits for old servers": System(SYNC, 2, 2, 2, crashes=1, client=WaitsForOld),
    "writes in place": System(ALONE, 2, 1, in_parts=True, in_place=True),
    "is not asked again": System(SYNC, 2, 1, cuts=1, client=AsksOnce),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        explore(WRONG[wrong], most=100_000)
