"""`python -m tests.explore`: see tests.explore.command. Strings hash alike each time."""

import os
import sys

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.explore", *sys.argv[1:]])
    from tests.explore.command import main

    sys.exit(main(sys.argv[1:]))
