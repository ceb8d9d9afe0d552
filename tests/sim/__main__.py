"""`python -m tests.sim`: see tests.sim.command. Strings hash alike each time: seeds repeat."""

import os
import sys

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    from tests.sim.command import main

    sys.exit(main(sys.argv[1:]))
