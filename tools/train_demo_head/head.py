"""The head as it is trained: all positions of a text at once, and the steps that it will draft unrolled over them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


class Attention(nn.Module):
    """Causal over the true positions; a step's query also sees the keys of the steps before it at its own position."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = config.hidden_size
        self.q_proj = nn.Linear(2 * width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)

    def forward(self, x: torch.Tensor, angles: Any, seen: list[Any]) -> torch.Tensor:  # [B, T, 2 * width]
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *angles)
        seen.append((k, v))
        q = q.reshape(rows, self.kv, -1, self.dim) / math.sqrt(self.dim)  # query heads of a kv head, one after another
        scores = (q @ seen[0][0].transpose(2, 3)).view(rows, self.kv, -1, length, length)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        q = q.view(rows, self.kv, -1, length, self.dim)
        own = [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in seen[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = (weights[..., :length].reshape(rows, self.kv, -1, length) @ seen[0][1]).view_as(q)
        for i, (_, v) in enumerate(seen[1:]):
            out = out + weights[..., length + i : length + i + 1] * v.unsqueeze(2)
        return self.o_proj(out.reshape(rows, self.heads, length, self.dim).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)

    def forward(self, embedded: torch.Tensor, x: torch.Tensor, angles: Any, seen: list[Any]) -> torch.Tensor:
        x = x + self.self_attn(torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1), angles, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """Its parameters are named as the published format has them."""

    def __init__(self, config: Any, layers: int, lm_head: torch.Tensor, norm: torch.Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(layers * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(lm_head), bias=False)
        self._rotary = LlamaRotaryEmbedding(config)
        for parameter in [*self.fc.parameters(), *self.midlayer.parameters()]:
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight.data.copy_(lm_head)  # the target's own rows are a good beginning
        self.norm.weight.data.copy_(norm)

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:  # [B, T, layers * width], [B, T], [vocabulary, width] -> steps times [B, T, width]
        """What the LM head reads: that of position t and step j predicts token t + 2 + j."""
        x, seen = self.fc(states), []
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        for step in range(steps):
            embedded = F.embedding(ahead(tokens, 1 + step), embedding)
            x = self.midlayer(embedded, x, self._rotary(x, positions + step), seen)
            yield self.norm(x)


def ahead(x: torch.Tensor, by: int) -> torch.Tensor:
    """x[:, t + by] at t; zero past the end."""
    return F.pad(x[:, by:], (0, 0) * (x.dim() - 2) + (0, by))
