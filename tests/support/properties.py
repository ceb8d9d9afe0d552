"""Property tests draw the same examples on every machine, however slow it is."""

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
"""Health checks that measure real time."""

settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=SLOW)


def load_profile() -> None:
    """Make these settings those of every property test."""
    settings.load_profile("tests")


def examples(count: int, *, is_fixture_shared: bool = False) -> settings:
    """Draw so many examples; a failing one is shrunk.

    `is_fixture_shared`: all examples of a test run with the same values of its fixtures.
    """
    shared = [HealthCheck.function_scoped_fixture] if is_fixture_shared else []
    profile = settings.get_profile("tests")
    return settings(profile, max_examples=count, suppress_health_check=[*SLOW, *shared])
