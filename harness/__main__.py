"""`python -m harness VERB`: in a checkout, the same as `vramsweep VERB`."""

import sys

from vramsweep.__main__ import main

sys.exit(main())
