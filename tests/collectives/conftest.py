"""Programs are carried out over Gloo here, whose messages are not ours; the backend `motet` has tests of its own."""

import pytest

from ranks import Ranks


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    return ranks.on("gloo")
