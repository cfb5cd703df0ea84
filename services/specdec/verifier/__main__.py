"""`python -m specdec.verifier` is `specdec verifier`."""

import sys

from specdec.cli import main

sys.exit(main(["verifier", *sys.argv[1:]]))
