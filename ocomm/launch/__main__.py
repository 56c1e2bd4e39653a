"""``python -m ocomm.launch`` is ``ocommrun``."""

import sys

from ocomm.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
