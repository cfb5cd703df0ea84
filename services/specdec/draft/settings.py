"""The draft's settings."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.settings import Settings


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies matrices in bfloat16. Without, it would be slower than float32."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


class DraftSettings(Settings):
    """Propose draft tokens to the verifier of the same pair on this machine. It waits for the verifier, and joins the
    next one when that ends, so the two may be started, stopped and restarted in any order."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT_")
    section: ClassVar[str] = "draft"

    pair: str = Field("default", description="name of the pair, as the verifier's --pair")
    drafter: str = Field(
        "ngram",
        description="'ngram' (prompt lookup, no weights), 'causal' (a small model, --model), 'eagle3' (an EAGLE-3 "
        "head, --model, and --target), or 'module:Class' with the two methods of Drafter",
    )
    model: str | None = Field(
        None, description="the draft's weights in transformers' format: a folder, or a name on the Hugging Face hub"
    )
    target: str | None = Field(
        None, description="the verifier's model, likewise: an EAGLE-3 head takes its embeddings from there"
    )
    device: str = Field("cpu", description="where the weights go: 'cpu', 'cuda:0', ...")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        "auto",
        description="type the draft computes in; 'auto' is bfloat16 on a GPU and on a CPU that multiplies it in "
        "hardware (AVX512-BF16, AMX, Arm's BF16), else float32; 'fp8' is bfloat16 with weights rounded to 8 bits, and "
        "on CUDA kept as such too, which makes one or two sessions faster",
    )
    memory_gb: float = Field(
        1.0, gt=0, description="GiB for keys and values; sessions beyond it, least recently used first, go on plainly"
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="the same as a share of the device's memory (a GPU's, or what this process may have "
        "of the machine's), in place of --memory-gb",
    )
    run_ahead: Literal["auto", "on", "off"] = Field(
        "auto",
        description="read new text and draft for likely outcomes while the verifier is busy (--drafter causal): 'auto' "
        "is on where --device is a GPU; 'off' suits a GPU that the target computes on too",
    )
    spin_ms: float | None = Field(
        None,
        ge=0,
        description="how long after an outcome the draft looks for the next without sleeping, while sessions "
        "are open: a core's time for a quicker answer; default 50 where --device is a GPU, else 0",
    )
    trust_vocabulary: CliImplicitFlag[bool] = Field(
        False, description="draft even where the drafter's tokenizer is not the target's"
    )
    host: str = Field("127.0.0.1", description="address health listens on")
    health_port: int = Field(8103, ge=1, le=65535, description="/livez, /readyz and /metrics of the draft")

    @property
    def computed_in(self) -> str:
        """The type, with the default filled in."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.device.startswith("cuda") or cpu_has_bfloat16() else "float32"

    @property
    def runs_ahead(self) -> bool:
        """On the CPU the draft would take the target's cores: not unless it is asked for."""
        return self.run_ahead == "on" or (self.run_ahead == "auto" and self.device.startswith("cuda"))

    @property
    def spin_s(self) -> float:
        """Seconds, with the default filled in."""
        default_ms = 50.0 if self.device.startswith("cuda") else 0.0
        return (default_ms if self.spin_ms is None else self.spin_ms) / 1000
