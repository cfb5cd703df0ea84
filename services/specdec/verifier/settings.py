"""The verifier's settings."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.settings import Settings


class VerifierSettings(Settings):
    """Serve a target model with vLLM, ready for drafts. vLLM's own arguments follow after `--`, for example
    `specdec verifier --model Qwen/Qwen3-32B -- --max-model-len 8192`."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_VERIFIER_")
    section: ClassVar[str] = "verifier"

    model: str = Field(
        min_length=1, description="the target: a model folder, a name vLLM can load, or specdec:demo, the demo's model"
    )
    pair: str = Field(
        "default", description="name of this verifier and its draft on this machine; names the segment in /dev/shm"
    )
    host: str = Field("127.0.0.1", description="address vLLM, control and health listen on")
    port: int = Field(8100, ge=1, le=65535, description="vLLM's OpenAI server")
    control_port: int = Field(8101, ge=1, le=65535, description="gRPC: orders in, verdicts out")
    health_port: int = Field(8102, ge=1, le=65535, description="/livez, /readyz and /metrics of the pair")
    advertise: str = Field(
        "", description="URL under which routers reach vLLM, or the address alone; default http://HOST:PORT"
    )
    control_secret_file: Path | None = Field(None, description="secret that routers must know, too")
    control_tls_cert: Path | None = Field(None, description="the control port's certificate (PEM)")
    control_tls_key: Path | None = Field(None, description="its key")
    control_tls_ca: Path | None = Field(None, description="authority that routers' certificates must be of")
    max_steps: int = Field(8, ge=1, le=64, description="largest step count k an order may ask for")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sessions vLLM runs at once (its own --max-num-seqs)")
    draft_deadline_ms: float = Field(
        0, ge=0, description="how long a cycle waits for its drafts; 0: 1.5 times the draft's p99, at least 2 ms"
    )
    head: str | None = Field(
        None,
        description="the EAGLE-3 head the draft runs, as its --model: its config says which layers' hidden states the "
        "target hands over",
    )
    states_mb: int = Field(
        64,
        ge=1,
        le=65536,
        description="with --head, memory in /dev/shm for hidden states on their way, in MiB; room for a pass's tokens, "
        "each the hidden size times the head's layers (3) times the type's bytes",
    )
    stall_s: float = Field(
        120,
        gt=0,
        description="not ready if the engine begins no cycle for so long while sessions are open, or gives no sign of "
        "life",
    )
    dead_s: float = Field(600, gt=0, description="end, to be restarted, if that lasts so long")
    start_timeout_s: float = Field(1800, gt=0, description="give up if vLLM is not ready by then")
    stop_grace_s: float = Field(30, ge=0, description="time running answers get after SIGTERM; then vLLM is killed")
