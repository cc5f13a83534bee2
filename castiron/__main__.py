"""`python -m castiron` is `castiron`."""

import sys

from castiron.pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
