"""Adapters and images: drafts change nothing about answers to requests that are more than text for one model."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_prompts import THREADS, Body, Document, ask_all, counted, fixed, knowing_drafts, same, sequences
from specdec.stack import Plain, Stack
from test_engine import metric
from tiny_vision import make_paddleocr_vl, picture

pytestmark = pytest.mark.engine
ARGS = [
    *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", "demo"),
    *("--max-num-batched-tokens", "256", "--block-size", "32", "--enable-prefix-caching"),
]
PROMPTS = ("Once upon a time, in a small town", "1, 2, 3, 4, 5, 6, 7,", "The capital of France is", "def add(a, b):")


@contextmanager
def servers(
    model: Path, folder: Path, args: Sequence[str], stack_args: Sequence[str] = ()
) -> Iterator[tuple[Plain, Stack]]:
    """vLLM without plug-ins, and a stack whose drafts know the answers in `folder`; they load side by side."""
    with (
        Plain(model, folder, args, THREADS) as plain,
        Stack(
            model,
            folder,
            router_args=fixed(4, 4),
            verifier_args=["--max-num-seqs", "16"],
            vllm_args=[*args, *stack_args],
            env=THREADS | knowing_drafts(folder / "oracle.json"),
        ) as stack,
    ):
        plain.wait_ready(300)
        yield plain, stack


def compare_with_drafts(stack: Stack, folder: Path, bodies: Sequence[Body], expected: list[Document]) -> float:
    """Asks the stack, with drafts that are right and drafts that are often not. Returns how often it preempted a
    session meanwhile."""
    (folder / "oracle.json").write_text(json.dumps(sequences(expected)))
    for drafter in ("Perfect", "Noisy"):
        stack.start_draft(f"fake_drafters:{drafter}")
        stack.wait_ready(300)
        accepted = []
        for body, right, got in zip(bodies, expected, ask_all(stack.url, bodies), strict=True):
            same(right, got, str(body)[:300])
            accepted.append(counted(body, got))
        if drafter == "Perfect":
            assert sum(accepted) > sum(right["usage"]["completion_tokens"] for right in expected) / 3
        assert sum(count > 0 for count in accepted) > len(bodies) * 0.8
    return metric(stack.vllm_url, "vllm:num_preemptions_total")


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of random numbers, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes = {  # (in, out)
        "self_attn.q_proj": (hidden, config["num_attention_heads"] * head),
        "self_attn.v_proj": (hidden, config["num_key_value_heads"] * head),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    rank, dice = 8, torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size_in, size_out) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, size_in, generator=dice) / size_in**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(size_out, rank, generator=dice) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
            | {"target_modules": [name.partition(".")[2] for name in shapes], "base_model_name_or_path": str(model)}
        )
    )
    return folder


def test_requests_of_several_adapters_and_of_none_share_cycles(model: Path, tmp_path: Path):
    """There is one place for adapters more than adapters: a token of none takes the last place's (vLLM's CPU kernels
    index with -1), which must stay empty."""
    names = ("demo", "a", "b", "c")
    modules = [f"{name}={make_adapter(model, tmp_path / name, ord(name))}" for name in names[1:]]
    args = [*ARGS, "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--lora-modules", *modules]
    bodies: list[Body] = [
        {"model": name, "prompt": prompt, "max_tokens": 20 + 4 * i, "logprobs": 1}
        for i, prompt in enumerate(PROMPTS)
        for name in names
    ]
    with servers(model, tmp_path, args) as (plain, stack):
        expected = ask_all(plain.url, bodies)
        assert [document["model"] for document in expected] == [body["model"] for body in bodies]
        answers = [document["choices"][0]["token_ids"] for document in expected]
        by_name = [answers[i :: len(names)] for i in range(len(names))]
        assert all(left != right for i, left in enumerate(by_name) for right in by_name[:i])
        compare_with_drafts(stack, tmp_path, bodies, expected)


def question(*parts: str, max_tokens: int) -> Body:
    """A chat request of texts and of images, which are data URLs."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "logprobs": True}


def test_requests_with_images_and_without_share_cycles(tmp_path: Path):
    """A pass reads 96 tokens, so prompts are cut within their images (64 tokens) and before. In the small KV cache
    sessions are preempted whose images were in the prefix cache when they began, and must be read again."""
    vision = tmp_path / "vision"
    make_paddleocr_vl(vision)
    apple, boat, wide = picture(1), picture(2), picture(3, 448, 112)
    long = " ".join(f"{i} boats left the harbour on day {i * 7 % 31}." for i in range(9))
    bodies = [question(text, max_tokens=60 + i) for i, text in enumerate(PROMPTS)]
    for i, text in enumerate(("What is it?", "Describe this picture in one sentence, please.", long)):
        bodies += [question(text, image, max_tokens=64 + i) for image in (apple, boat, wide)]
    bodies += [
        question(apple, "and", boat, "are not alike.", max_tokens=64),
        question(apple, "and", apple, "are alike.", max_tokens=64),
        question(wide, long, apple, max_tokens=64),
    ]
    args = [*ARGS, "--max-num-batched-tokens", "96"]
    with servers(vision, tmp_path, args, ["--num-gpu-blocks-override", "40"]) as (plain, stack):
        expected = ask_all(plain.url, bodies)
        answers = [document["choices"][0]["token_ids"] for document in expected]
        assert all(left != right for i, left in enumerate(answers) for right in answers[:i])
        assert max(document["usage"]["prompt_tokens"] for document in expected) > 2 * 96
        assert compare_with_drafts(stack, tmp_path, bodies * 4, expected * 4) > 10
