"""A target so small that the probability of every answer can be worked out, a draft that knows it a little, and a
policy that changes k all the time.

The draft and the router load this module too: torch and transformers are imported only where the target is made.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specdec.draft.drafters import DraftSession
from specdec.router.pairs import Session, Verdict
from specdec.router.steps import Order

VOCABULARY = 8
END = 0  # the token that ends an answer
WORDS = range(1, VOCABULARY)
MAX_TOKENS = 6  # a prompt's first token, then at most k = 4 drafts and a bonus token
STEPS = (2, 0, 1, 4, 3)
Answer = tuple[int, ...]  # token ids; the last is END, or there are MAX_TOKENS of them


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the fields are the API's."""

    temperature: float
    top_k: int = -1
    top_p: float = 1.0

    def probabilities(self, logits: np.ndarray) -> np.ndarray:  # [..., vocabulary]
        """Temperature, then the k likeliest, then the fewest of those that together hold top_p of their mass."""
        scaled = logits.astype(np.float64) / self.temperature
        order = np.argsort(-scaled, axis=-1)
        ranked = np.take_along_axis(scaled, order, axis=-1)
        if self.top_k > 0:
            ranked[..., self.top_k :] = -np.inf
        likely = np.exp(ranked - ranked[..., :1])
        likely /= likely.sum(axis=-1, keepdims=True)
        if self.top_p < 1:
            likely[np.cumsum(likely, axis=-1) - likely >= self.top_p] = 0  # those before it hold enough
            likely /= likely.sum(axis=-1, keepdims=True)
        result = np.empty_like(likely)
        np.put_along_axis(result, order, likely, axis=-1)
        return result


class Tree:
    """The target's logits after a prompt and every beginning of an answer to it."""

    def __init__(self, levels: Sequence[np.ndarray]) -> None:
        self._levels = levels  # by length of the beginning: [WORDS ** length, vocabulary], in the order of `product`

    def answers(self, sampling: Sampling) -> dict[Answer, float]:
        """The probability of every answer that has one."""
        result: dict[Answer, float] = {}
        weights = np.ones(1)  # of the beginnings
        for length, logits in enumerate(self._levels):
            joint = weights[:, None] * sampling.probabilities(logits)
            last = length + 1 == len(self._levels)
            for row, beginning in zip(joint.tolist(), product(WORDS, repeat=length), strict=True):
                for token in range(VOCABULARY) if last else (END,):
                    if row[token]:
                        result[*beginning, token] = row[token]
            weights = joint[:, 1:].ravel()
        return result

    def likely(self, count: int) -> Iterator[tuple[Answer, list[int]]]:
        """Every beginning that more than one token may follow, with the `count` likeliest of those that do."""
        for length, logits in enumerate(self._levels[:-1]):
            ranked = np.argsort(-logits, axis=-1)[:, :count].tolist()
            yield from zip(product(WORDS, repeat=length), ranked, strict=True)

    def greedy(self) -> Answer:
        """The likeliest token each time."""
        ids: list[int] = []
        at = 0
        for logits in self._levels:
            ids.append(int(logits[at].argmax()))
            if ids[-1] == END:
                break
            at = at * len(WORDS) + ids[-1] - 1
        return tuple(ids)

    def greedy_margin(self) -> float:
        """The smallest gap between the likeliest token and the next on the greedy answer's way."""
        at, gaps = 0, []
        for logits, token in zip(self._levels, self.greedy(), strict=False):
            second, first = np.sort(logits[at])[-2:]
            gaps.append(float(first - second))
            at = at * len(WORDS) + token - 1
        return min(gaps)


class Target:
    """A random Llama in float32, saved in `folder` for vLLM with a tokenizer of eight words."""

    def __init__(self, folder: Path, seed: int = 2) -> None:
        import torch
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.35,  # with transformers' 0.02 all tokens would be as likely
            bos_token_id=None,
            eos_token_id=END,
            tie_word_embeddings=False,
        )
        self._model: Any = LlamaForCausalLM(config).float().eval()
        self._model.save_pretrained(folder)
        words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w1"))
        words.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", unk_token="w1").save_pretrained(folder)
        self.folder = folder

    def tree(self, prompt: Sequence[int]) -> Tree:
        """All that may follow a prompt."""
        import torch

        with torch.inference_mode():
            out = self._model(torch.tensor([list(prompt)]), use_cache=True)
            levels = [out.logits[:, -1]]
            for _ in range(MAX_TOKENS - 1):
                out.past_key_values.batch_repeat_interleave(len(WORDS))
                words = torch.tensor(list(WORDS)).repeat(len(levels[-1]))[:, None]
                out = self._model(words, past_key_values=out.past_key_values)
                levels.append(out.logits[:, -1])
        return Tree([level.numpy() for level in levels])


class Drafter:
    """Guesses the likeliest token, and sometimes the second or third. Which one, the tokens so far decide: the same
    session always gets the same drafts."""

    def __init__(self) -> None:
        self._likely: dict[str, list[int]] = json.loads(Path(os.environ["SPECDEC_TEST_TINY"]).read_text())

    @staticmethod
    def teach(path: Path, trees: Mapping[tuple[int, ...], Tree]) -> None:
        """Writes what drafters know: the three likeliest tokens at every point where one may be drafted."""
        known = {
            str([*prompt, *beginning]): likely for prompt, tree in trees.items() for beginning, likely in tree.likely(3)
        }
        path.write_text(json.dumps(known))

    def propose(self, sessions: Sequence[DraftSession], steps: Sequence[int]) -> list[list[int]]:
        return [list(self._guesses(list(s.tokens), k)) for s, k in zip(sessions, steps, strict=True)]

    def forget(self, session: DraftSession) -> None: ...

    def _guesses(self, tokens: list[int], k: int) -> Iterator[int]:
        for _ in range(k):
            likely = self._likely.get(str(tokens), list(WORDS))  # nothing is known of what would follow the end
            tokens.append(likely[(0, 0, 1, 0, 2)[sum(tokens) % 5]])
            yield tokens[-1]


class Striding:
    """Another step count every cycle. Only the prompt's length and the session's cycles decide, so that seeded answers
    repeat."""

    def __init__(self, steps: int, max_steps: int, window: int) -> None:
        self._window = window

    def order(self, session: Session) -> Order:
        prompt_tokens = session.context - session.committed
        return Order(STEPS[(prompt_tokens + session.cycles) % len(STEPS)], self._window)

    def observe(self, verdict: Verdict) -> None: ...
