"""`python -m specdec.draft` is `specdec draft`."""

import sys

from specdec.cli import main

sys.exit(main(["draft", *sys.argv[1:]]))
