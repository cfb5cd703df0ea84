"""vLLM's CPU worker with its drafting taken out and one of its kernels mended (`--worker-cls`, model runner V1)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from specdec.errors import SetupError
from specdec.verifier.states import HandOver, layers_from_environment


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:  # [batch], [batch] -> [num_tokens]
    """Repeats each row's value for each of its draft tokens, for every dtype.

    vLLM 0.32's CPU kernel writes int64 only (vllm#55005): temperature, top_k and top_p arrive as uninitialised memory,
    and every sampled answer of a speculative batch is noise.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    if replace_from == replace_to:
        return expanded
    return torch.where(expanded == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), expanded)


class NoProposer:
    """`method: custom_class` wants a class. Proposals come through the channel instead; this one proposes nothing."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


def _mask_bonus(
    processor: MinTokensLogitsProcessor, drafts: list[int], logits: torch.Tensor
) -> torch.Tensor:  # [batch, vocab]
    """Forbids the stop tokens where the token after the row's drafts still comes too early to stop."""
    rows: list[int] = []
    stops: list[int] = []
    restorable: list[bool] = []
    for row, (minimum, output, stop_ids, structured) in processor.min_toks.items():
        if len(output) + drafts[row] < minimum:
            rows += [row] * len(stop_ids)
            stops += stop_ids
            restorable += [structured] * len(stop_ids)
    masked = torch.tensor(rows, dtype=torch.long), torch.tensor(stops, dtype=torch.long)
    may_return = torch.tensor(restorable, dtype=torch.bool)
    processor._mask_stop_token_logits(logits, masked, (masked[0][may_return], masked[1][may_return]))
    return logits


class Runner(CPUModelRunner):
    _hand_over: HandOver | None = None  # rank 0's, with a head

    def _setup_eagle3_aux_hidden_state_outputs(self) -> None:
        layers = layers_from_environment(self.model_config.hf_text_config.num_hidden_layers)
        if layers is None:
            return
        model = self.get_model()
        if not supports_eagle3(model):
            raise SetupError(f"vLLM's {type(model).__name__} does not give its hidden states: it cannot have a --head")
        model.set_aux_hidden_state_layers(layers)
        self.use_aux_hidden_state_outputs = True
        if get_tensor_model_parallel_rank() == 0:
            self._hand_over = HandOver(layers, self.model_config.get_hidden_size(), self.model_config.dtype)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Before sampling, so that the states have left when the scheduler tells the draft what stands."""
        if self._hand_over and (came := self.execute_model_state):
            ids = self.input_ids.cpu[: came.scheduler_output.total_num_scheduled_tokens]
            self._hand_over.write(came.scheduler_output, self.input_batch, ids, came.aux_hidden_states)
        return super().sample_tokens(grammar_output)

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """A prompt's chunk before its last samples a token that is thrown away. With a seed, its draw must be taken
        back, or the answer depends on how the prompt was cut."""
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None  # vLLM's rejection sampler ends the engine on top_k where no row has drafts
        discarded = self._discarded_generators()
        states = {row: generator.get_state() for row, generator in discarded.items()}
        with self._min_tokens_after_drafts(spec_decode_metadata):
            output = super()._sample(logits, spec_decode_metadata)
        for row, generator in discarded.items():
            generator.set_state(states[row])
        return output

    @contextmanager
    def _min_tokens_after_drafts(self, spec_decode_metadata: Any) -> Iterator[None]:
        """A bonus token follows its row's drafts, so `min_tokens` binds it only where the drafts leave a token due.
        vLLM counts the drafts for the drafts' own rows but not for the bonus token's, which then may not be a stop."""
        processors = self.input_batch.sampling_metadata.logitsprocs.non_argmax_invariant
        due = [p for p in processors if isinstance(p, MinTokensLogitsProcessor) and p.min_toks]
        if spec_decode_metadata is None or not due:
            yield
            return
        for processor in due:
            processor.apply = partial(_mask_bonus, processor, spec_decode_metadata.num_draft_tokens)
        try:
            yield
        finally:
            for processor in due:
                del processor.apply  # the class's own again

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM takes the draw back by the generator's offset, which CPU generators do not have: the engine would end
        at the first seeded request whose prompt is cut. `_sample` has done it already, so nothing is left to find."""
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _discarded_generators(self) -> dict[int, torch.Generator]:
        generators = self.input_batch.generators
        if not generators:
            return {}
        discard = self.discard_request_mask.np
        return {row: generator for row, generator in generators.items() if discard[row]}

    def take_draft_token_ids(self) -> None:
        return None  # the scheduler sets drafts itself, from the channel

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        """Nothing to copy. Near the context limit the base class would, through buffers that a CPU has not."""


class Worker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        original, cpu_worker.CPUModelRunner = cpu_worker.CPUModelRunner, Runner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original
