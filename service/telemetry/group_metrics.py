"""Metrics of consumer groups, by group.

Generation, members and lag are in every broker's state, so each broker exports the same values.
Rebalances, their duration and refused joins are only in the memory of a group's coordinator. So
only the coordinator exports them, and counts from zero when it becomes the coordinator.

The first METRIC_GROUPS_MAX groups have series of their own. All other groups share the label
OTHER_GROUPS (I10). The duration of a rebalance is a gauge by group: it shows a group whose
rebalance does not end. A histogram would have 15 series for each group.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tidelog.service.telemetry.group_lags import (
    METRIC_GROUPS_MAX,
    OTHER_GROUPS,
    SERIES_MAX,
    LagTotals,
)
from tidelog.service.telemetry.log_metrics import Labelled, counter, gauge
from tidelog.storage.broker import Broker
from tidelog.storage.groups.rebalance_counts import REASONS

GROUP = ["group"]
REST = f"; `group` has the first {METRIC_GROUPS_MAX} groups, {OTHER_GROUPS} has "


class GroupCollector(Collector):
    """The collector of the metrics of a broker's groups."""

    def __init__(self, broker: Broker, lags: LagTotals) -> None:
        self._broker = broker
        self._lags = lags

    def collect(self) -> Iterator[Metric]:
        lags = self._lags
        doc = f"records after the group's position, for the first {SERIES_MAX} partitions of groups"
        yield gauge("group_lag", doc, ["group", "topic", "partition"], lags.series)
        totals = lags.groups.items()
        doc = f"lag of the group in all its partitions together{REST}the sum of all others"
        yield gauge(
            "group_lag_records", doc, GROUP, [([label], lag.total) for label, lag in totals]
        )
        doc = f"largest lag of the group in one partition{REST}the largest of all others"
        yield gauge("group_lag_max", doc, GROUP, [([label], lag.largest) for label, lag in totals])
        doc = (
            "age of the oldest record that the group has not read, of the partitions where it is "
            f"known; absent if it is not known{REST}the largest of all others"
        )
        ages = [([label], lag.seconds) for label, lag in totals if lag.seconds is not None]
        yield gauge("group_lag_seconds", doc, GROUP, ages)
        yield from self._states()
        yield from self._of_coordinator()

    def _states(self) -> Iterator[Metric]:
        groups = list(self._broker.state.members)
        values = ((group.group_id, group.generation) for group in groups)
        doc = f"generation of the group{REST}the sum of all others"
        yield gauge("group_generation", doc, GROUP, self._by_group(values))
        values = ((group.group_id, len(group.members)) for group in groups)
        doc = f"members of the group{REST}the sum of all others"
        yield gauge("group_size", doc, GROUP, self._by_group(values))

    def _of_coordinator(self) -> Iterator[Metric]:
        """Yield the metrics of the groups that this broker coordinates."""
        now_s = self._broker.clock.boot_s()
        groups = [
            (group.group_id, rest_group)
            for group, rest_group in self._broker.groups.rest.members.groups()
        ]
        rebalances: list[Labelled] = []
        for reason in REASONS:
            counts = ((name, group.rebalances.counts[reason]) for name, group in groups)
            values = self._by_group((name, count) for name, count in counts if count)
            rebalances += (([*labels, reason], count) for labels, count in values)
        doc = (
            "rebalances of the group, by reason; only its coordinator counts them"
            f"{REST}the sum of all others"
        )
        yield counter("group_rebalances", doc, ["group", "reason"], rebalances)
        durations_s = ((name, group.rebalances.seconds(now_s)) for name, group in groups)
        doc = (
            "time from the group's last rebalance until all members had read again, or until now "
            f"if some have not; only its coordinator exports it{REST}the longest of all others"
        )
        yield gauge("group_rebalance_seconds", doc, GROUP, self._by_group(durations_s, max))
        refused = ((name, group.short_lives.refused) for name, group in groups)
        doc = (
            "joins refused because too many of the client's members had short lives; only the "
            f"group's coordinator counts them{REST}the sum of all others"
        )
        yield counter("group_joins_held", doc, GROUP, self._by_group(refused))

    def _by_group(
        self,
        values: Iterable[tuple[str, float]],
        together: Callable[[float, float], float] = lambda value, other: value + other,
    ) -> list[Labelled]:
        own, value_by_label = self._lags.groups, dict[str, float]()
        for group_id, value in values:
            label = group_id if group_id in own else OTHER_GROUPS
            value_by_label[label] = (
                together(value_by_label[label], value) if label in value_by_label else value
            )
        return [([label], value) for label, value in value_by_label.items()]
