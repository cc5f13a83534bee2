"""The entry point of `python -m castiron`, which does the same as the command `castiron`."""

import sys

from castiron.pipelines.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
