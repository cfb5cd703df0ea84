"""Lets the target write its own training data with vLLM: conversations as token ids, in NAME.npz.

Nearly half of them begin with nothing but the opening of the chat template: what an instruction-tuned model then writes
is a user's message (Magpie, arXiv 2406.08464). The others begin with a prompt of prompts.jsonl. One process keeps one
engine busy; several share a GPU well where the target is small: give each its own --part.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

from conversations import Conversation, save

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of answers; users' messages are sampled at 1
MARK = "\u241e"


class Writer:
    """Turns prompts into conversations, `waiting` requests of an engine."""

    def __init__(self, model: Path, prompts: list[dict[str, str]], own: float, seed: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        whole = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
        )
        again = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
            + [{"role": "user", "content": MARK}],
            tokenize=False,
        )
        self.opening, closing = whole.split(MARK)
        between = again.split(MARK)[2]  # from an answer to the next user's message
        end = self.tokenizer.decode([self.end])
        if not (closing.startswith(end) and between.startswith(end)):
            raise SystemExit("the chat template ends messages with another token than the tokenizer's eos_token")
        self.closing, self.to_answer, self.to_user = closing, closing[len(end) :], between[len(end) :]
        self._random = random.Random(seed)
        self._prompts, self._own = prompts, own

    @property
    def end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def begin(self) -> Conversation:
        """The next conversation."""
        temperature, turns = self._random.choice(TEMPERATURES), int(self._random.random() < 0.25)
        if not self._prompts or self._random.random() < self._own:
            return Conversation(self.ids(self.opening), temperature, turns, user_next=True)
        prompt = self._prompts.pop()
        if prompt["kind"] == "raw":
            return Conversation(self.ids(prompt["text"])[:1500], temperature, 0)
        closing = self.ids(self.closing)
        return Conversation((self.ids(self.opening + prompt["text"]))[:1500] + closing, temperature, turns)

    def take(self, it: Conversation, answer: list[int]) -> bool:
        """Appends what the target wrote. Returns whether it is to go on writing."""
        it.generated.append((len(it.tokens), len(it.tokens) + len(answer)))
        it.tokens += answer
        ended = answer[-1] == self.end
        if it.user_next:
            it.user_next = False
            it.tokens += self.ids(self.to_answer)
            return ended and len(answer) > 3
        it.user_next = ended and it.turns > 0
        if it.user_next:
            it.turns -= 1
            it.tokens += self.ids(self.to_user)
        return it.user_next and len(it.tokens) < 1400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for part-I.npz")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th prompt")
    parser.add_argument("--seconds", type=float, default=300, help="begin no conversation after this long")
    parser.add_argument("--own", type=float, default=0.45, help="share of conversations that the target begins")
    parser.add_argument("--at-once", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.15, help="share of the GPU's memory")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    from vllm import EngineArgs, LLMEngine, SamplingParams

    part, parts = map(int, args.part.split("/"))
    lines = args.prompts.read_text().splitlines()[part::parts]
    writer = Writer(args.model, [json.loads(line) for line in lines], args.own, args.seed * 1000 + part)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(args.model),
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=args.at_once,
            gpu_memory_utilization=args.memory,
            seed=args.seed * 1000 + part,
            disable_log_stats=True,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # compiling does not pay in minutes
        )
    )
    running: dict[str, Conversation] = {}
    done: list[Conversation] = []
    number, written, start = 0, 0, time.monotonic()

    def ask(it: Conversation) -> None:
        nonlocal number
        number += 1
        running[str(number)] = it
        sampling = SamplingParams(
            temperature=1.0 if it.user_next else it.temperature,
            max_tokens=200 if it.user_next else 384,
            stop_token_ids=[writer.end],
            detokenize=False,
        )
        engine.add_request(str(number), {"prompt_token_ids": it.tokens}, sampling)

    while True:
        elapsed = time.monotonic() - start
        while elapsed < args.seconds and len(running) < args.at_once:
            ask(writer.begin())
        if not running or elapsed > args.seconds * 1.15:
            break
        for output in engine.step():
            if not output.finished:
                continue
            it, answer = running.pop(output.request_id), list(output.outputs[0].token_ids)
            written += len(answer)
            if answer and writer.take(it, answer):
                ask(it)
            elif it.generated:
                done.append(it)
    save(args.out / f"part-{part}.npz", done)
    seconds = time.monotonic() - start
    print(json.dumps({"part": part, "conversations": len(done), "written": written, "seconds": round(seconds)}))


if __name__ == "__main__":
    main()
