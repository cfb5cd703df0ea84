"""`python -m loadtest ab --host URL` and `python -m loadtest report FOLDER`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest._ab import ab
from loadtest._client import SetupError
from loadtest._report import write

_USAGE = """python -m loadtest ab --host URL     compare speculation off, auto and fixed (--help: options)
python -m loadtest report FOLDER    write the report of such a run anew from its samples
locust -f loadtest/ --host URL      load alone"""


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    try:
        if argv[:1] == ["ab"]:
            return ab(argv[1:])
        if argv[:1] == ["report"] and len(argv) == 2:
            print(write(Path(argv[1])))
            return 0
    except SetupError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(_USAGE, file=sys.stdout if argv[:1] in (["-h"], ["--help"]) else sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
