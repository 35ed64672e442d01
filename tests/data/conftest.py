"""No test of this package depends on how fast the machine is."""

from hypothesis import settings

settings.register_profile("data", deadline=None)
settings.load_profile("data")
