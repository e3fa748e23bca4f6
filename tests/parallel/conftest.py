"""One world of four processes for every parallel test of a session."""

from collections.abc import Iterator

import pytest

from tests.parallel.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Starts with its first case; a case names its own number of ranks: `world.run(function, ..., size=2)`."""
    world = World(4)
    yield world
    world.close()
