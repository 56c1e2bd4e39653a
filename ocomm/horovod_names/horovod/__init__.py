"""The ``horovod`` that processes of ``ocommrun --as-horovod`` find, in a folder that is first on their path: ocomm."""

import importlib
import sys

from ocomm import as_horovod

as_horovod.install()
# The import under way returns what has this name when it is over.
del sys.modules[__name__]
importlib.import_module(__name__)
