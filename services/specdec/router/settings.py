"""The router's settings."""

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.settings import Settings


class RouterSettings(Settings):
    """Serve the OpenAI API in front of one or more pairs, and run their speculation loops."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_ROUTER_")
    section: ClassVar[str] = "router"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="the OpenAI API, /livez, /readyz and /metrics")
    pairs: list[Annotated[str, Field(pattern=r"^\S+:\d+$")]] = Field(
        ["127.0.0.1:8101"], min_length=1, description="control addresses of the pairs, HOST:PORT"
    )
    policy: str = Field(
        "auto",
        description="how k is chosen: 'auto' (measured cost), 'fixed' (always --steps), 'accept-length', or"
        " 'module:Class', one of your own",
    )
    steps: int = Field(4, ge=0, le=64, description="k to start with, and k for ever with --policy fixed")
    max_steps: int = Field(8, ge=0, le=64, description="largest k to order; a pair may allow less")
    window: int = Field(
        4,
        ge=1,
        le=64,
        description="cycles a session may run before its next order must have come; 1: one order a cycle",
    )
    lease_ms: int = Field(
        1000, ge=50, le=60_000, description="how long a session waits for its next order before it decodes plainly"
    )
    connect_timeout_s: float = Field(2, gt=0, description="connecting to a pair")
    read_timeout_s: float = Field(600, gt=0, description="longest silence of vLLM within one answer")
    max_body_mb: float = Field(32, gt=0, description="largest request body; larger ones get 413")
    trace_cycles: int = Field(
        16, ge=1, description="where traces are on, spans for the first of a session's cycles and then each of so many"
    )
    drain_s: float = Field(30, ge=0, description="time running answers get after SIGTERM")
