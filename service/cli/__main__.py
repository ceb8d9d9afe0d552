"""The entry point of the script `tidelog`. An interrupt ends it without a traceback, also while the
command line loads, which takes 0.1 s."""

import sys

from tidelog.service.exit_status import EXIT_INTERRUPTED


def main() -> int:
    """Run the command line. Return the exit status."""
    try:
        from tidelog.service.cli.main import main as run
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
