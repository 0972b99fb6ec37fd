"""Properties try the same examples in every run, so that a test fails because of a change and not by chance."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
