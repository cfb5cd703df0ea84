"""`python -m specdec` is `specdec`."""

import sys

from specdec.cli import main

sys.exit(main())
