"""``python -m ocomm.launch`` is ``ocommrun``."""

import sys

from ocomm.launch.cli import main

sys.exit(main())
