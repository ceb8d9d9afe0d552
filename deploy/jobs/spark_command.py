"""`tidelog` as the application that spark-submit runs: a command's arguments follow."""

import sys

from service.cli import main

if __name__ == "__main__":
    sys.exit(main())
