"""Exit statuses of brokers and commands, and the errors that end both with EXIT_UNREACHABLE."""

from tidelog.storage.core.errors import StoreUnfit, Unavailable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4
EXIT_SIGNALS = 128
"""Plus the number of a signal: the status of a process that the signal has ended."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

EXIT_STATUSES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed, or refused by the broker",
    EXIT_USAGE: "wrong usage",
    EXIT_UNREACHABLE: "the broker or the store cannot be reached or used",
    EXIT_NOT_FOUND: "no such topic, partition, group or key",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_TERMINATED: "ended by SIGTERM",
}

UNREACHABLE_ERRORS = (StoreUnfit, Unavailable)
"""Errors of the log that end a broker or a command with the status EXIT_UNREACHABLE."""
