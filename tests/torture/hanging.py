"""A module that never finishes being imported."""

import time

time.sleep(3600)
