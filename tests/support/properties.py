"""How properties are tried: the same examples on every machine, however slow it is today."""

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """So many, drawn alike each time; shrunk when one fails."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
