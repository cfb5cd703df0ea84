"""The router's settings."""

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.settings import Settings


class RouterSettings(Settings):
    """Serve the OpenAI API in front of one or more pairs, and run their speculation loops."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_ROUTER_")
    section: ClassVar[str] = "router"

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="the OpenAI API, /livez and /readyz")
    admin_host: str = Field("127.0.0.1", description="address of the admin port")
    admin_port: int = Field(8001, ge=1, le=65535, description="/livez, /readyz and /metrics")
    api_keys_file: Path | None = Field(
        None,
        description="API keys, one a line, each as it is or as sha256:HEX; read again when the file changes",
    )
    auth: CliImplicitFlag[bool] = Field(
        True, description="whether --host beyond loopback needs --api-keys-file; --no-auth serves everybody"
    )
    pairs: list[Annotated[str, Field(pattern=r"^(dns://)?[^\s/]+:\d+$")]] = Field(
        ["127.0.0.1:8101"],
        min_length=1,
        description="control addresses of the pairs: HOST:PORT, or dns://NAME:PORT for all that a name has, followed"
        " as they change",
    )
    control_secret_file: Path | None = Field(None, description="secret that the pairs know, too")
    control_tls_cert: Path | None = Field(None, description="the router's certificate for the pairs (PEM)")
    control_tls_key: Path | None = Field(None, description="its key")
    control_tls_ca: Path | None = Field(None, description="authority that the pairs' certificates are of")
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
    max_step_age_s: float = Field(
        60, gt=0, description="a pair whose engine has begun no cycle for so long, with sessions open, gets no requests"
    )
    max_sessions: int = Field(
        0, ge=0, description="sessions running at once (n counts n); 0: as many as the ready pairs say they hold"
    )
    max_waiting: int = Field(256, ge=0, description="sessions waiting for a place; beyond them requests get 429")
    max_waiting_tokens: int = Field(2_000_000, ge=0, description="their prompts' tokens, estimated from bytes")
    max_waiting_mb: float = Field(
        512,
        ge=0,
        description="requests' bodies in memory: being received, waiting, and sent to a pair that has not begun to"
        " answer; then 429",
    )
    queue_timeout_s: float = Field(30, gt=0, description="longest wait for a place; then 429")
    write_timeout_s: float = Field(60, gt=0, description="a client that reads nothing for so long is given up")
    keepalive_s: float = Field(15, gt=0, description="a silent stream gets a comment as often, for proxies in front")
    max_body_mb: float = Field(32, gt=0, description="largest request body; larger ones get 413")
    body_timeout_s: float = Field(120, gt=0, description="longest time for a request's body to come; then 408")
    trace_cycles: int = Field(
        16, ge=1, description="where traces are on, spans for the first of a session's cycles and then each of so many"
    )
    max_prompt_tokens: int = Field(
        1_000_000, ge=1, description="of one request, estimated from bytes; what the model takes is vLLM's to say"
    )
    max_choices: int = Field(256, ge=1, description="n times the prompts of one request")
    max_logprobs: int = Field(20, ge=0, description="as vLLM's own --max-logprobs, which may allow less")
    drain_s: float = Field(30, ge=0, description="time running answers get after SIGTERM")

    @property
    def on_loopback(self) -> bool:
        """Whether nobody but this machine reaches the API."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
