"""The entry point of the script `tidelog`.

An interrupt ends it without a traceback, also while the command line loads, which takes 0.1 s.
"""

import os
import sys

from tidelog.service.exit_status import EXIT_INTERRUPTED


def main() -> int:
    """Run the command line. Return the exit status."""
    _open_streams()
    try:
        from tidelog.service.cli.main import main as run
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return run()


def _open_streams() -> None:
    """Open the standard streams that the caller has closed.

    stdin is empty, a write to stdout fails with one line, and text for stderr is dropped.
    """
    streams = (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY))
    for number, (name, flags) in enumerate(streams):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
