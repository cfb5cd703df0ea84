"""Trains an EAGLE-3 head for a target and writes it as published (`LlamaForCausalLMEagle3`).

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer reads the target's states of a low, a middle and a high layer, and
from its second step on its own output in their place; training unrolls those steps (the training-time test), so that
the head learns from its own features. The loss of each step is the cross-entropy against the target's distribution over
the draft's vocabulary, the target's most frequent tokens. The target is a Llama; the head's layer has its shape.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conversations import Data
from head import Head, ahead
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "rope_parameters", "vocab_size", "bos_token_id", "eos_token_id"),
)


class CrossEntropy(torch.autograd.Function):
    """Sum over rows of H(p, softmax(x @ w.T)), and the likeliest of each. Its gradients are made on the way, so that no
    logits are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> Any:
        loss, best = x.new_zeros((), dtype=torch.float32), x.new_empty(len(x), dtype=torch.long)
        dx, dw = torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32)
        for begin in range(0, len(x), 8192):
            rows = slice(begin, begin + 8192)
            logits = (x[rows] @ w.T).float()
            best[rows] = logits.argmax(-1)
            log = logits.log_softmax(-1)
            loss -= (p[rows] * log).sum()
            d = (log.exp() - p[rows]).to(x.dtype)
            dx[rows] = d @ w
            dw += d.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        dx, dw = ctx.saved_tensors
        return grad.to(dx.dtype) * dx, (grad * dw).to(dx.dtype), None


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        torch.manual_seed(args.seed)
        self.data = Data(args.data, args.held_out)
        self.target = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(self.device).eval()
        config = self.config = self.target.config
        n = config.num_hidden_layers
        self.layers = args.layers or [2, n // 2, n - 3]
        counts = self.data.counts(config.vocab_size)
        begun = load_file(args.begin / "model.safetensors") if args.begin else None
        common = np.sort(np.argsort(-counts, kind="stable")[: args.draft_vocab])
        drafted = torch.from_numpy(common) if begun is None else begun["d2t"] + torch.arange(len(begun["d2t"]))
        self.drafted = drafted.to(self.device)  # [draft vocabulary] the target's ids
        self.covered = counts[drafted.numpy()].sum() / counts.sum()
        self.embedding = self.target.get_input_embeddings().weight.detach()
        self.rows = self.target.get_output_embeddings().weight.detach()[self.drafted]
        self.head = Head(config, len(self.layers), self.rows, self.target.model.norm.weight).to(self.device)
        if begun is not None:
            self.head.load_state_dict({name: begun[name] for name, _ in self.head.named_parameters()}, strict=False)

    def losses(self, tokens: torch.Tensor, written: torch.Tensor, steps: int) -> Iterator[Any]:
        """For each step (loss a token, which positions count [B, T], the draft ids it chose there)."""
        with torch.no_grad():
            out = self.target.model(tokens, output_hidden_states=True)
            states = torch.cat([out.hidden_states[i] for i in self.layers], -1)
            wanted = ahead(written, 1)  # at s: the target wrote s + 1
            p = torch.zeros(*tokens.shape, len(self.rows), dtype=torch.bfloat16, device=self.device)
            p[wanted] = (out.last_hidden_state[wanted] @ self.rows.T).softmax(-1)
        lm_head = self.head.lm_head.weight.to(torch.bfloat16)
        with torch.autocast(self.device.type, torch.bfloat16):
            for step, x in enumerate(self.head(states, tokens, self.embedding, steps)):
                counts = ahead(wanted, 1 + step)
                loss, best = CrossEntropy.apply(x[counts].to(torch.bfloat16), lm_head, ahead(p, 1 + step)[counts])
                yield loss / counts.sum().clamp(min=1), counts, best

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """On held-out greedy answers: how often drafts up to each step stand, at any position that the target wrote."""
        steps = self.args.steps
        stood, count = torch.zeros(steps, device=self.device), 0
        for tokens, written in self.data.batches(self.args.batch, None, self.device):
            alive, whole = torch.ones_like(written), ahead(written, 1 + steps)  # where all its steps count
            for step, (_, counts, best) in enumerate(self.losses(tokens, written, steps)):
                right = torch.zeros_like(written)
                right[counts] = self.drafted[best] == ahead(tokens, 2 + step)[counts]
                alive = alive & right
                stood[step] += (alive & whole).sum()
            count += int(whole.sum())
        each = (stood / max(1, count)).tolist()
        return {"stood": [round(x, 4) for x in each], "accept_length_3": round(1 + sum(each[:3]), 3)}

    def train(self) -> None:
        args, order = self.args, random.Random(self.args.seed)
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.log(parameters=sum(p.numel() for p in self.head.parameters()), tokens=self.data.tokens)
        self.log(settings={k: str(v) for k, v in vars(args).items()}, covered=round(float(self.covered), 4))
        start, step, done, measured = time.monotonic(), 0, 0.0, 0.0
        while done < 1:
            for tokens, written in self.data.batches(args.batch, order, self.device):
                done = (time.monotonic() - start) / args.seconds
                if done >= 1:
                    break
                rate = args.rate * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                each = [loss for loss, _, _ in self.losses(tokens, written, args.steps)]
                sum(args.decay**i * loss for i, loss in enumerate(each)).backward()
                nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % args.log_every == 0:
                    seconds = round(done * args.seconds)
                    self.log(step=step, seconds=seconds, rate=rate, loss=[round(x.item(), 3) for x in each])
                if done - measured > 0.1:
                    measured = done
                    self.log(step=step, held_out=self.evaluate())
                    self.save()
        self.log(step=step, held_out=self.evaluate())
        self.save()

    def log(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)
        with (self.args.out / "train.log").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def save(self) -> None:
        tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in self.head.named_parameters()}
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill(0, self.drafted.cpu(), True)
        tensors |= {"d2t": self.drafted.cpu() - torch.arange(len(self.drafted)), "t2d": known}
        save_file(tensors, self.args.out / "model.safetensors", {"format": "pt"})
        config = {name: getattr(self.config, name) for name in _SHAPE} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.drafted),
            "target_hidden_size": self.config.hidden_size,
            "max_position_embeddings": 2048,  # the longest it was trained on
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "rope_theta": self.config.rope_parameters["rope_theta"],  # for engines that know no rope_parameters
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.layers, "use_aux_hidden_state": True},
        }
        (self.args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True, help="folder of part-I.npz, from answers.py")
    add("--out", type=Path, required=True)
    add("--begin", type=Path, help="a head to go on from")
    add("--draft-vocab", type=int, default=16384)
    add("--layers", type=int, nargs="*", help="default 2, n // 2, n - 3")
    add("--steps", type=int, default=5, help="steps that training unrolls")
    add("--decay", type=float, default=0.9, help="weight of a step's loss against that before")
    add("--batch", type=int, default=16384, help="tokens a batch")
    add("--rate", type=float, default=1e-3)
    add("--seconds", type=float, default=520, help="the rate falls to 2 %% over them")
    add("--held-out", type=int, default=256, help="greedy conversations to measure on")
    add("--log-every", type=int, default=50)
    add("--device", default="cuda")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args).train()


if __name__ == "__main__":
    main()
