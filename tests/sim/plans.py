"""The plan of a seed: what kind of world it is, and what goes wrong in it.

Swarm testing: each world has some of the faults and some of the features, and much of those.
"""

import random
from typing import NamedTuple

from tests.sim.clients import Load
from tests.sim.network import Air
from tests.sim.stores import Weather
from tidelog.compaction.garbage import Grace
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.cluster.sequencer import SequencerSettings
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.log_settings import LogSettings, PaceSettings
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.core.topic_configs import FLUSH_MS
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.seal.sealer import SealerSettings
from tidelog.storage.wal.wal_objects import WalSettings
from tidelog.storage.write.writer import WriterSettings

SKEW_MS_MAX = 1_000_000
"""A clock that is an hour ahead ends idempotency keys an hour sooner, on all brokers."""

FEATURES = ("static", "seeks", "workers", "garden")
"""Of worlds of groups: members that come again in their own place; that read again what they have
read; that produce what they make of records; topics that come, grow and go."""

DELETIONS = 0.25
"""In how many worlds with maintenance clients move log starts too."""

MERGING = 0.6
"""In how many worlds with maintenance brokers merge small segments."""

FIRST_LEVEL = 0.25
"""How many worlds begin at level 1. Some of them are raised, at any moment."""

PACED = 0.4
"""How many worlds have a pace that makes commits wait, and requests with classes."""
PACES = (
    PaceSettings(commits_per_minute=240, commits_burst=1),
    PaceSettings(commits_per_minute=240, commits_burst=20),
    PaceSettings(commits_per_minute=600, commits_burst=3),
    PaceSettings(flush_interval_ms=150),
)
LINGERS_S = (None, None, None, 0.0, 0.2, 2.0)
FLUSH_CLASSES_MS = ("0", "200", "3000")

WRONG_CLOCKS = 0.5
"""How many worlds have clocks that jump by days, and guests whose boot time misses a pause. Those
of level 1 have no jumps: there, all ages are by the greatest time of any clock."""
YEAR_MS = 365 * 86_400_000

PARTS = 0.7
"""How many of the worlds with large drafts upload them in parts, begun while segments are open."""

HASTY, HASTY_SLEEPERS = 0.3, 0.5
"""How many worlds, and how many with suspended processes, have maintenance commands whose own WAL
retention is 0. There, a view outlives most stops."""
HASTY_BOUNDS = Bounds(4000, 16_000, 5000)
LOWER_BOUNDS = SetBounds(400, 1600)
RAISED_BOUNDS = SetBounds(12_000, 48_000)
"""To which hasty worlds with suspended processes change them, if no clock of theirs jumps: a jump
is hours, and what is lowered waits for minutes here."""

KINDS = ("brokers", "sleepers", "tables", "groups", "disks")


class Plan(NamedTuple):
    """The plan of one seed: faults, features, sizes."""

    kind: str
    brokers: int
    run_s: float
    settings: LogSettings
    grace: Grace
    weather: Weather
    air: Air
    load: Load
    configs: dict[str, str]
    producers: int
    readers: int
    members: int
    has_disks: bool
    carers: int
    trouble_s: float
    """Mean time from one trouble to the next."""
    stop_s: float
    """Mean length of a stop."""
    troubles: tuple[str, ...]
    features: frozenset[str] = frozenset()
    """Of groups."""
    level: int = format_levels.NEWEST
    """Of the format, at which the cluster begins."""
    command_grace: Grace | None = None
    """The grace of maintenance commands; None: that of the cluster."""
    is_deleted: bool = False
    """While retention runs, clients move log starts."""
    merge_after_s: float | None = None
    """After this time without a look, brokers look for small segments; None: never."""
    has_guests: bool = False
    """A stop is a pause of the broker's machine, which its boot time misses."""

    @property
    def is_paced(self) -> bool:
        """Whether commits wait for their turn, and requests have classes."""
        return len(self.load.lingers_s) > 1

    @property
    def is_hasty(self) -> bool:
        """Whether maintenance commands have a shorter WAL retention than the cluster."""
        return self.command_grace is not None


def plan_of(seed: int) -> Plan:
    draws = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    is_sleepy, has_tables = kind == "sleepers", kind in {"tables", "sleepers"}
    view_s = 1.0 if is_sleepy else draws.choice([5.0, 60.0])
    grace = Grace(wal_ms=int(view_s * 4000) + 500, table_ms=int(view_s * 5000))
    cold = ReaderSettings(0, 0, 0, 0)
    # A client that waits this long gets the answer of a broker that was suspended.
    patience_s = draws.choice([8.0, 200.0, 200.0]) if is_sleepy else draws.choice([2.0, 8.0])
    settings = LogSettings(
        wal=WalSettings(
            Bounds(int(view_s * 1000), *grace),
            checkpoint_entries=draws.choice([3, 10, 50]),
            checkpoint_interval_s=0.5,
        ),
        writer=WriterSettings(answer_timeout_s=patience_s / 2),
        reader=draws.choice([cold, ReaderSettings()]),
        sealer=SealerSettings(check_interval_s=0.5, sealed_wait_s=0.3),
        membership=MembershipSettings(
            heartbeat_interval_s=1.0, member_timeout_s=3.0, quiet_interval_s=4.0, quiet_look_s=3.0
        ),
        sequencer=SequencerSettings(
            handover_timeout_s=0.3,
            handover_bytes_max=draws.choice([100, 512 * 1024]),
        ),
        tail_cache_bytes=draws.choice([0, 1 << 20]),
        poll_interval_s=draws.choice([0.3, 1.0]),
        quiet_poll_s=3.0,
        is_sealing=has_tables or draws.random() < 0.3,
    )
    rate = draws.choice([0.0, 0.02, 0.1, 0.25])
    weather = Weather(
        lost=rate,
        refused=draws.choice([0.0, rate / 4]),
        failed=draws.choice([0.0, 0.02, rate / 2]),
        median_s=draws.choice([0.005, 0.02, 0.1]),
        spread=draws.choice([0.3, 1.0]),
        late_s=draws.choice([0.2, 2.0]),
    )
    loss = draws.choice([0.0, 0.02, 0.15])
    is_compacted = kind == "tables" and draws.random() < 0.3
    seal_ms = draws.choice(["700", "2500", "700", "30000"] if is_sleepy else ["700", "2500"])
    configs = {"segment.ms": seal_ms} if settings.is_sealing else {}
    if has_tables and draws.random() < 0.5:
        configs["retention.ms"] = draws.choice(["4000", "9000"])
        configs["message.timestamp.type"] = "LogAppendTime"
    if is_compacted:
        configs |= {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1"}
        configs |= {"delete.retention.ms": "1000"}
        configs.pop("retention.ms", None)
    troubles: tuple[str, ...] = (
        "kill",
        "end",
        "stop",
        "kill",
        "skew",
        "weather",
        "air",
        "carer",
        "full",
    )
    if is_sleepy:
        troubles = ("half sent", "half sent", "stop", "kill", "carer", "weather", "air", "end")
    plan = Plan(
        kind,
        brokers=1 if kind == "disks" else draws.choice([2, 3] if is_sleepy else [1, 2, 3, 3, 4]),
        run_s=draws.uniform(25.0, 40.0) if is_sleepy else draws.uniform(6.0, 18.0),
        settings=settings,
        grace=grace,
        weather=weather,
        air=Air(loss, loss / 2, loss / 2, draws.choice([0.001, 0.01]), loss),
        load=Load(
            partitions=draws.choice([1, 2, 3]),
            pause_s=draws.choice([0.15, 0.4]) * (2 if is_sleepy else 1),
            local=0.7 if kind == "disks" else 0.0,
            is_compacted=is_compacted,
            patience_s=patience_s,
        ),
        configs=configs,
        producers=draws.choice([1, 2, 3]),
        readers=draws.choice([1, 2]),
        members=draws.choice([2, 3]) if kind == "groups" else 0,
        has_disks=kind == "disks",
        carers=draws.choice([1, 1, 2]) if has_tables else 0,
        trouble_s=draws.choice([2.0, 4.0] if is_sleepy else [0.7, 2.0, 4.0]),
        stop_s=draws.choice([3.0, 10.0, 15.0]) if is_sleepy else draws.choice([0.3, 2.0]),
        troubles=troubles[: draws.choice([4, 9])],
    )
    # Dice of its own: worlds that begin at the newest level are as they were without this.
    if random.Random(f"level {seed}").random() < FIRST_LEVEL:
        plan = plan._replace(level=format_levels.FIRST, troubles=(*plan.troubles, "upgrade"))
    own = random.Random(f"{seed} exceptions")  # older seeds stay what they were
    raises, refused_part = (
        own.choice([0.0, 0.0, 0.1 if kind == "disks" else 0.03]),
        own.choice([b"", b"3."]),
    )
    odd = plan.weather._replace(raises=raises, refused_part=refused_part)
    plan = plan._replace(weather=odd)
    clocks = random.Random(f"clocks {seed}")
    if clocks.random() < WRONG_CLOCKS:
        jumps = () if plan.level == format_levels.FIRST else ("days",)
        plan = plan._replace(troubles=(*plan.troubles, *jumps), has_guests=True)
    if clocks.random() < (HASTY_SLEEPERS if is_sleepy else HASTY):
        settings = settings._replace(wal=settings.wal._replace(bounds=HASTY_BOUNDS))
        plan = plan._replace(command_grace=grace._replace(wal_ms=0), settings=settings)
        if is_sleepy:
            changes = "days" not in plan.troubles and clocks.random() < 0.6
            added_troubles = (
                ("lowered", "lowered", "raised", "kill") if changes else ("half sent",) * 6
            )
            often = settings.wal._replace(checkpoint_entries=3)
            plan = plan._replace(
                brokers=3,
                producers=3,
                carers=2,
                troubles=added_troubles if changes else (*plan.troubles, *added_troubles),
                stop_s=5.0 if changes else 2.5,
                trouble_s=2.0,
                settings=settings._replace(wal=often),
            )
    if is_sleepy and settings.sequencer.handover_bytes_max < 1000 and not plan.is_hasty:
        often = settings.wal._replace(checkpoint_entries=3)
        plan = plan._replace(
            brokers=3,
            producers=3,
            carers=2,
            run_s=40.0,
            trouble_s=2.0,
            troubles=("uploaded", "uploaded", "uploaded", "kill", "air"),
            stop_s=15.0,
            load=plan.load._replace(patience_s=200.0),
            settings=settings._replace(
                wal=often, writer=settings.writer._replace(answer_timeout_s=100.0)
            ),
        )
    plan = _paced(plan, seed)
    if plan.settings.sequencer.handover_bytes_max < 1000:
        plan = _in_parts(plan, random.Random(f"parts {seed}"))
    if has_tables and random.Random(f"deletions {seed}").random() < DELETIONS:
        plan = plan._replace(is_deleted=True)
    merging = random.Random(f"merging {seed}")
    if has_tables and merging.random() < MERGING:
        plan = plan._replace(merge_after_s=merging.choice([0.5, 2.0]))
    if kind != "groups":
        return plan
    return plan._replace(
        features=frozenset(feature for feature in FEATURES if draws.random() < 0.4)
    )


def _paced(plan: Plan, seed: int) -> Plan:
    """Dice of its own: the other worlds are as they were without a pace."""
    draws = random.Random(f"pace {seed}")
    if draws.random() >= PACED:
        return plan
    configs = dict(plan.configs)
    if plan.level != format_levels.FIRST and draws.random() < 0.5:
        configs[FLUSH_MS] = draws.choice(FLUSH_CLASSES_MS)
    return plan._replace(
        settings=plan.settings._replace(pace=draws.choice(PACES)),
        configs=configs,
        load=plan.load._replace(lingers_s=LINGERS_S),
    )


def _in_parts(plan: Plan, draws: random.Random) -> Plan:
    """The world with uploads of a few records, some of which end with their broker."""
    if draws.random() >= PARTS:
        return plan
    settings = plan.settings
    sequencer = settings.sequencer._replace(
        alone_bytes_max=draws.choice([100, 1000]),
        upload_bytes=draws.choice([1, 100]),
        uploads_max=draws.choice([1, 8]),
    )
    # Requests that wait for the interval make parts, too.
    pace = settings.pace
    if interval_ms := draws.choice([0, 300]):
        pace = pace._replace(flush_interval_ms=interval_ms)
    return plan._replace(
        settings=settings._replace(sequencer=sequencer, pace=pace),
        troubles=(*plan.troubles, "half uploaded"),
    )
