"""What the stand-in's target says: a phrase of the prompt's own, over and over, so that prompt lookup has work."""

import zlib

VOCABULARY = 1000
PERIOD = 6


def prompt_tokens(prompt: str) -> list[int]:
    """A token a byte."""
    return list(prompt.encode())


def script(prompt: str, count: int) -> list[int]:
    """The first `count` tokens of the answer."""
    return [256 + zlib.crc32(prompt.encode(), i % PERIOD) % (VOCABULARY - 256) for i in range(count)]


def text_of(tokens: list[int]) -> str:
    return "".join(f" {token}" for token in tokens)
