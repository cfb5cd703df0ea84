"""Speculative decoding served across processes."""

__version__ = "0.1.0"
