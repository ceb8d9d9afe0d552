"""All targets by name."""

from tests.tools.fuzz import (
    backup_targets,
    head_target,
    http_target,
    kafka_batch_target,
    kafka_frames_target,
    kafka_target,
    service_targets,
    storage_targets,
)
from tests.tools.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *storage_targets.TARGETS,
        *kafka_batch_target.TARGETS,
        *kafka_target.TARGETS,
        *kafka_frames_target.TARGETS,
        *backup_targets.TARGETS,
        *service_targets.TARGETS,
        *http_target.TARGETS,
        *head_target.TARGETS,
    )
}
