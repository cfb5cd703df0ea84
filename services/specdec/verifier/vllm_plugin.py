"""What vLLM's API process needs of us: it loads neither worker nor scheduler plug-in, only `vllm.general_plugins`."""

import os
from typing import Any

from specdec.verifier import SEGMENT_VARIABLE


def register() -> None:
    """The entry point. May be called several times in a process."""
    if SEGMENT_VARIABLE not in os.environ:
        return  # not a verifier's vLLM
    from vllm.sampling_params import SamplingParams

    SamplingParams._validate_spec_decode = _say_why


def _say_why(self: Any, speculative_config: Any) -> None:
    """vLLM refuses min_p and logit_bias with speculation, without a word on what to do, and should refuse a third."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import _SAMPLING_EPS

    if speculative_config is None:
        return
    if self.logprob_token_ids is not None:
        raise VLLMValidationError(
            "logprob_token_ids cannot be used here: beside another request's logprobs it would end vLLM's engine once "
            "drafts are verified. A server without speculation takes it.",
            parameter="logprob_token_ids",
        )
    refused = [
        name for name, is_set in (("min_p", self.min_p > _SAMPLING_EPS), ("logit_bias", self.logit_bias)) if is_set
    ]
    if refused:
        raise VLLMValidationError(
            f"{' and '.join(refused)} cannot be used here: vLLM's CPU runner applies it to the last token of a "
            "speculative cycle only, so the answer would not be what was asked for, and it refuses it on every server "
            "set up for speculative decoding, whatever the request's own step count. A server without speculation "
            "takes it.",
            parameter=refused[0],
        )
