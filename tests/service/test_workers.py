"""How soon a worker that ends is started again."""

from tidelog.service.server.workers import RESTART_S, RESTART_S_MAX, restart_pause_s


def test_first_restart_comes_at_once_and_next_ever_later() -> None:
    pauses = [restart_pause_s(failures) for failures in range(1, 40)]
    assert pauses[0] == 0.0
    assert pauses[1:4] == [RESTART_S, 2 * RESTART_S, 4 * RESTART_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RESTART_S_MAX
