"""The file `locust -f loadtest/` loads: the users. README.md beside it says what they do and what is measured."""

import sys
from pathlib import Path

from locust import events

sys.path.append(str(Path(__file__).resolve().parent.parent))  # wherever locust is started

from loadtest import _locust

events.init_command_line_parser.add_listener(_locust.add_arguments)


@events.init.add_listener
def _(environment, **_):  # type: ignore[no-untyped-def]
    _locust.set_up(environment)


class Chat(_locust.Conversing):
    """Short questions, medium answers."""

    kind = "chat"


class Summarise(_locust.Conversing):
    """Long texts, short answers that repeat much of them."""

    kind = "summarise"


class Code(_locust.Conversing):
    """Python to be changed, explained or tested: answers that repeat much of it."""

    kind = "code"


class Agent(_locust.Conversing):
    """Three to six turns on one growing prefix, after a system prompt that all share."""

    kind = "agent"


class Mixed(_locust.Conversing):
    """All four, mostly chat and code. What runs if no user is named."""

    kind = "mixed"
