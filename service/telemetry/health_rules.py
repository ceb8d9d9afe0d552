"""Whether a cluster is well, and if not, why: a pure function of facts.

`judge` names each fault that an operator has to act on, with the section of deploy/README.md that
says what to do. It uses no clock and no IO: ages are facts. The route of the console's package
collects the facts; the command `tidelog status` and the console show the result.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tidelog.service.quantities import rounded
from tidelog.service.telemetry.broker_health import BrokerSigns
from tidelog.service.telemetry.maintenance_results import MaintenanceResult

RUNBOOKS: Final = "deploy/README.md"
CLOCK_MS_MAX = 30_000
"""Half of what makes a broker unready (SKEW_MS_MAX). A broker knows the store's time to some
seconds: from the newest object that it listed."""
VIEW_AGE_S_MAX = 180.0
"""An idle broker reads the WAL once a minute. By the store's time, its view is twice as old at
most: that time is known from the last answer before."""
STORE_FAILURES_MIN = 3
STORE_FAILURES_SHARE = 0.05
TAIL_LATE_S = 900.0
"""How long a tail may wait for its seal after it is due by its age."""
IDLE_LAG_S = 600.0
"""Lag of a group without members, in seconds, that is a fault."""
LAG_S = 3600.0
"""Lag of a group with members, in seconds, that is a fault."""
GROUPS_NAMED_MAX = 20
HOUR_S, DAY_S = 3600.0, 86_400.0
LATE_S: Final = {
    "retain": 6 * HOUR_S,
    "collect": DAY_S,
    "compact": 7 * DAY_S,
    "scrub": 30 * DAY_S,
}
"""Maintenance of a kind is late if no run was complete for this time."""
COMMANDS: Final = {
    "retain": "tidelog maintain --yes",
    "collect": "tidelog maintain --yes",
    "compact": "tidelog maintain --yes",
    "scrub": "tidelog scrub",
}


class BrokerFacts(NamedTuple):
    """A live broker. `signs` is None if it did not answer the broker that asks."""

    name: str
    version: str
    level: int
    signs: BrokerSigns | None


class GroupFacts(NamedTuple):
    """A group with its lag. `lag_s` is None if it is not known."""

    group: str
    members: int
    lag: int
    lag_s: float | None


class TailFacts(NamedTuple):
    """A topic's tail, `late_s` after the time at which it was due."""

    topic: str
    late_s: float


class MaintenanceFacts(NamedTuple):
    """The last result of a kind of maintenance, and the time (s) since a complete run.

    The result is that of a command or of a broker's round. Without a complete run, it is the time
    since the cluster could have had one.
    """

    kind: str
    since_s: float
    last: MaintenanceResult | None


class Facts(NamedTuple):
    """The facts about a cluster.

    `why_not_ready` is that of the broker that answers. `sequencers` has the name of the sequencer
    as each broker that answered sees it. `gone` has the brokers whose heartbeats ended without a
    clean stop.
    """

    why_not_ready: str
    brokers: Sequence[BrokerFacts]
    sequencers: Sequence[str]
    gone: Sequence[str]
    tails: Sequence[TailFacts]
    maintenance: Sequence[MaintenanceFacts]
    groups: Sequence[GroupFacts]


class Problem(NamedTuple):
    """A fault.

    `name` is one word for programs, `runbook` the file and section that says what to do.
    """

    name: str
    what: str
    runbook: str


def judge(facts: Facts) -> list[Problem]:
    """Return the faults of the cluster, the worst first. An empty list means that it is well."""
    return [
        Problem(name, text, f"{RUNBOOKS}#{anchor}")
        for part in (_store, _brokers, _sealing, _maintenance, _groups)
        for name, anchor, text in part(facts)
    ]


_Found = Iterator[tuple[str, str, str]]


def _store(facts: Facts) -> _Found:
    if facts.why_not_ready:
        is_clock = "clock" in facts.why_not_ready
        anchor = "a-broker-is-not-ready-because-of-its-clock" if is_clock else "the-store-fails"
        yield "not-ready", anchor, f"the broker that answers is not ready: {facts.why_not_ready}"
    for broker, signs in _answered(facts):
        store = signs.store
        if signs.why_not_writing:
            why = f"broker {broker.name} cannot write: {signs.why_not_writing}"
            yield "store-fails", "the-store-fails", why
        elif _is_failing(sum(store.requests.values()), store.failures):
            count = f"{store.failures:,} of {sum(store.requests.values()):,} requests to the store"
            yield "store-fails", "the-store-fails", f"{count} of broker {broker.name} failed"
        elif signs.flush_failures:
            why = f"{signs.flush_failures:,} flushes of broker {broker.name} failed"
            yield "store-fails", "the-store-fails", why
        if signs.view_age_s > VIEW_AGE_S_MAX:
            age = f"broker {broker.name} has not read the WAL for {rounded(signs.view_age_s)}"
            yield "view-old", "a-broker-is-down", age
        if signs.set_aside:
            why = f"{signs.set_aside:,} requests with acks=1 on the disk of broker {broker.name}"
            yield "set-aside", "the-store-fails", f"the store refuses {why}"


def _brokers(facts: Facts) -> _Found:
    for name in facts.gone:
        why = f"broker {name} has written no heartbeat, and did not stop cleanly"
        yield "broker-gone", "a-broker-is-down", why
    for broker in facts.brokers:
        if broker.signs is None:
            why = f"broker {broker.name} is live, but does not answer this broker"
            yield "broker-silent", "brokers-do-not-reach-each-other", why
    if len(sequencers := sorted(set(facts.sequencers))) > 1:
        why = f"brokers disagree about the sequencer: {', '.join(sequencers)}"
        yield "sequencers-differ", "brokers-do-not-reach-each-other", why
    levels = sorted({broker.level for broker in facts.brokers})
    if len(levels) > 1:
        named = ", ".join(f"{broker.name} knows {broker.level}" for broker in facts.brokers)
        yield "levels-differ", "upgrade", f"brokers know different levels of the format: {named}"
    for broker, signs in _answered(facts):
        if abs(signs.clock_ms) > CLOCK_MS_MAX:
            side = "ahead of" if signs.clock_ms > 0 else "behind"
            why = f"the clock of broker {broker.name} is {abs(signs.clock_ms) / 1000:.0f} s {side}"
            anchor = "a-broker-is-not-ready-because-of-its-clock"
            yield "clock", anchor, f"{why} the store's"


def _sealing(facts: Facts) -> _Found:
    for broker, signs in _answered(facts):
        if signs.seals_failing:
            named = _some(signs.seals_failing, signs.seals_failing_names, "partition")
            why = f"broker {broker.name} cannot seal {named}: its log has the reason"
            yield "seals-fail", "tails-are-not-sealed", why
        if signs.doubts:
            named = _some(signs.doubts, signs.doubts_names, "topic")
            yield "table-in-doubt", "a-table-is-in-doubt", f"the tables of {named} are in doubt"
        if signs.damaged_tails:
            named = _some(signs.damaged_tails, signs.damaged_tails_names, "partition")
            yield "tail-damaged", "an-object-is-damaged", f"the tails of {named} are damaged"
    late = [tail for tail in facts.tails if tail.late_s > TAIL_LATE_S]
    if late:
        worst = max(late, key=lambda tail: tail.late_s)
        why = f"{len(late):,} topics have tails that are not sealed: that of {worst.topic} is due"
        yield "tails-late", "tails-are-not-sealed", f"{why} for {rounded(worst.late_s)}"


def _maintenance(facts: Facts) -> _Found:
    for kind, since_s, last in facts.maintenance:
        if last is not None and last.damage:
            objects = (
                "one damaged object" if last.damage == 1 else f"{last.damage:,} damaged objects"
            )
            why = f"the last scrub found {objects}: {last.what}"
            yield "damage", "an-object-is-damaged", why
        elif last is not None and not last.is_ok:
            why = f"the last {kind} failed: {last.what}"
            yield f"{kind}-failed", "maintenance-does-not-run", why
        if since_s > LATE_S[kind]:
            why = f"no {kind} was complete for {rounded(since_s)}: {COMMANDS[kind]}"
            yield f"{kind}-late", "maintenance-does-not-run", why


def _groups(facts: Facts) -> _Found:
    idle = [
        group for group in facts.groups if not group.members and group.lag and _is_old(group.lag_s)
    ]
    for group in idle[:GROUPS_NAMED_MAX]:
        why = f"group {group.group} has no members and {group.lag:,} unread records"
        yield "group-without-members", "a-group-has-no-members", f"{why}{_oldest(group.lag_s)}"
    slow = [group for group in facts.groups if group.members and (group.lag_s or 0.0) > LAG_S]
    for group in slow[:GROUPS_NAMED_MAX]:
        why = f"group {group.group} is {group.lag:,} records behind"
        yield "group-behind", "a-group-falls-behind", f"{why}{_oldest(group.lag_s)}"
    unnamed_count = max(len(idle) - GROUPS_NAMED_MAX, 0) + max(len(slow) - GROUPS_NAMED_MAX, 0)
    if unnamed_count:
        why = f"{unnamed_count:,} more groups are behind: tidelog groups list"
        yield "groups-behind", "a-group-falls-behind", why


def _answered(facts: Facts) -> Iterator[tuple[BrokerFacts, BrokerSigns]]:
    return ((broker, broker.signs) for broker in facts.brokers if broker.signs is not None)


def _is_failing(requests: int, failures: int) -> bool:
    return failures >= STORE_FAILURES_MIN and failures > STORE_FAILURES_SHARE * requests


def _is_old(lag_s: float | None) -> bool:
    return lag_s is None or lag_s > IDLE_LAG_S


def _oldest(lag_s: float | None) -> str:
    return "" if lag_s is None else f", the oldest is {rounded(lag_s)} old"


def _some(count: int, names: Sequence[str], noun: str) -> str:
    suffix = f" and {count - len(names):,} more" if count > len(names) else ""
    return f"{', '.join(names)}{suffix}" if names else f"{count:,} {noun}s"
