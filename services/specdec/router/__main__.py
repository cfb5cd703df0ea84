"""`python -m specdec.router` is `specdec router`."""

import sys

from specdec.cli import main

sys.exit(main(["router", *sys.argv[1:]]))
