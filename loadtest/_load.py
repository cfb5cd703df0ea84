"""A server, the conversations it is asked, and what each request came to: what locust and the A/B comparison share."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest._client import FAILED, OK, Message, Sample, SetupError, Target
from loadtest._prompts import Conversation, Prompts

_SHORT, _LONG = 200, 1200  # characters of the two requests that tell how many make a token


@dataclass
class Load:
    """A target with the model to ask. Made ready by `prepare`."""

    target: Target
    prompts: Prompts
    model: str = ""
    fields: dict[str, Any] = field(default_factory=dict)  # added to every request

    def prepare(self) -> None:
        """Asks the server what it serves and how many characters make a token. Raises SetupError."""
        models = self.target.models()
        found = [model for model in models if not self.model or model.get("id") == self.model]
        if not found:
            raise SetupError(f"{self.target.url} serves {[m.get('id') for m in models]}, not {self.model!r}")
        self.model, self.prompts.context = found[0]["id"], found[0].get("max_model_len")
        long = self.prompts.texts(_LONG)
        short, all_of_it = self._prompt_tokens(long[:_SHORT]), self._prompt_tokens(long)
        if all_of_it > short > 0:  # the difference, so that the template does not count
            self.prompts.chars_a_token = (len(long) - _SHORT) / (all_of_it - short)

    def _prompt_tokens(self, text: str) -> int:
        """What the server counts; 0 where it is too busy to say."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        sample, _ = self.target.chat(body)
        if sample.status == FAILED:  # a 429 is no reason not to begin
            raise SetupError(f"{self.target.url}: a first request failed: {sample.error}")
        return sample.prompt_tokens

    def converse(
        self,
        conversation: Conversation,
        due: float,
        start: float,
        stopping: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> Iterator[Sample]:
        """The samples of a conversation, turn by turn; one that is not answered ends it.

        `due` is when its first turn is, and `start` when the run began, both instants of time.perf_counter.
        """
        messages: list[Message] = conversation.opening()
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.text})
            body = {"model": self.model, "messages": messages, "max_tokens": turn.max_tokens, "temperature": 0}
            sample, text = self.target.chat({**body, **self.fields, **fields}, due)
            yield replace(sample, kind=conversation.kind, arrival_s=due - start)
            if sample.status != OK or stopping():
                return
            messages.append({"role": "assistant", "content": text})
            due = time.perf_counter()
