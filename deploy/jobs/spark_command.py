"""The command line `tidelog` as an application of spark-submit: the arguments are the command's."""

import sys

from tidelog.service.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
