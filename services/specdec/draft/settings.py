"""The draft's settings."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from specdec.settings import Settings


class DraftSettings(Settings):
    """Propose draft tokens to the verifier of the same pair on this machine. It waits for the verifier, and joins the
    next one when that ends, so the two may be started, stopped and restarted in any order."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT_")
    section: ClassVar[str] = "draft"

    pair: str = Field("default", description="name of the pair, as the verifier's --pair")
    drafter: str = Field(
        "ngram", description="'ngram' (prompt lookup, no weights), or 'module:Class' with the two methods of Drafter"
    )
    trust_vocabulary: CliImplicitFlag[bool] = Field(
        False, description="draft even where the drafter's tokenizer is not the target's"
    )
    host: str = Field("127.0.0.1", description="address health listens on")
    health_port: int = Field(8103, ge=1, le=65535, description="/livez, /readyz and /metrics of the draft")
