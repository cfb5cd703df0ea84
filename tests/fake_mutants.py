"""Faults of sampling, switched on in a running engine (`--worker-extension-cls`, POST /collective_rpc). Whatever checks
the distribution of sampled answers must find each of them."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

_UNMENDED = rejection_sampler.expand_batch_to_tokens  # vLLM loads this module before the worker mends it


def full_redraw(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """After a mismatch all of the distribution is drawn from, not the residual: the draft token is not left out."""

    def sample_recovered_tokens(
        max_spec_len: int,
        num_draft_tokens: list[int],
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,  # [drafts, vocabulary]
        *args: Any,
    ) -> torch.Tensor:
        nothing = torch.zeros_like(target_probs)
        return own(max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, nothing, target_probs, *args)

    return sample_recovered_tokens


def stale_drafts(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The drafts of earlier cycles are accepted by the logits that were computed for the present ones."""
    earlier = torch.empty(0, dtype=torch.int32)

    def rejection_sample(draft_token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal earlier
        stale = torch.cat([earlier, draft_token_ids])[: len(draft_token_ids)]
        earlier = torch.cat([earlier, draft_token_ids])[-512:]  # more than one cycle has
        return own(stale, *args, **kwargs)

    return rejection_sample


def no_temperature(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Drafts are judged at temperature 1."""

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        if replace_from != replace_to:  # only the temperature is expanded so
            return x.new_ones(num_tokens)
        return own(x, cu_num_tokens, num_tokens)

    return expand_batch_to_tokens


def unmended_kernel(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's own function: its CPU kernel leaves the temperatures uninitialised. (With top_k it may end the engine.)"""
    return _UNMENDED


MUTANTS = {
    "full_redraw": ("sample_recovered_tokens", full_redraw),
    "stale_drafts": ("rejection_sample", stale_drafts),
    "no_temperature": ("expand_batch_to_tokens", no_temperature),
    "unmended_kernel": ("expand_batch_to_tokens", unmended_kernel),
}


class Mutants:
    """vLLM adds this to its worker's bases."""

    def switch_on(self, name: str) -> None:
        """One of MUTANTS."""
        function, mutant = MUTANTS[name]
        own = getattr(rejection_sampler, function)
        self._mended = function, own
        setattr(rejection_sampler, function, mutant(own))

    def switch_off(self) -> None:
        """The one that is on."""
        setattr(rejection_sampler, *self._mended)
