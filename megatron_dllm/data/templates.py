"""Supervised turns of a conversation as (prompt, response) token lists, by the tokenizer's chat template.

    prompt     the conversation up to the turn, its generation header included: what the model is given when it generates
    response   the turn's own tokens, through its end-of-turn token

Templates with generation tags say themselves which tokens are the turn's. For those without, three renderings are compared:

    before   <bos> <user> hello <end>                                       messages before the turn
    prompt   <bos> <user> hello <end> <model>                               the same, with the generation prompt
    through  <bos> <user> hello <end> <model> good morning <end>            messages through the turn

and the response is what `through` has after `prompt`, which must be its prefix token by token. Some templates put more into the generation
prompt than into an answer (an empty thought block): then the response is what `through` has after the answer's own header; a probe finds
how much more that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .report import SampleError
from .tokenizers import ChatTokens, Message, Tokenizer

PROBE_USER = "probe question"
PROBE_ANSWERS = ("First answer.", "Other reply!")  # they share no first token, so what their renderings share is header


@dataclass(frozen=True)
class Turn:
    """One supervised turn: token ids of the prompt and of the response."""

    prompt: list[int]
    response: list[int]


class TurnRenderer:
    """Cuts conversations into turns with one tokenizer's template. `notes` says what a user should know about the template.

    ValueError at construction if the template cannot be cut, found on a conversation of one question and one answer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.notes: list[str] = []
        self._prompt_extra: list[int] = []  # what the generation prompt has beyond the header of a plain answer
        question = [{"role": "user", "content": PROBE_USER}]
        chats = [[*question, {"role": "assistant", "content": answer}] for answer in PROBE_ANSWERS]
        try:
            self._probe_prompt(question, chats)
            for chat in chats:
                self._check_probe(chat)
        except SampleError as error:
            raise ValueError(f"tokenizer {tokenizer.name}: its chat template fails on one question and one answer: {error}; give "
                             "another with --chat-template") from error

    def turn(self, messages: Sequence[Message], place: int, tools: Sequence[Any] | None = None, *, truncated: bool = False) -> Turn:
        """The assistant turn at messages[place]. A truncated answer gets no end-of-turn token. SampleError if it cannot be learned from."""
        message = messages[place]
        if not message.get("content", "").strip() and not any(message.get(key) for key in ("tool_calls", "reasoning", "reasoning_content")):
            raise SampleError("empty response")
        through = self._render(messages[:place + 1], tools)
        if through.assistant_mask is None:
            turn = self._turn_by_prefix(messages, place, tools, through.ids)
        else:
            turn = self._turn_by_mask(messages, place, tools, through)
        return self._closed(turn, truncated)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> ChatTokens:
        return self.tokenizer.apply_chat_template(messages, tools)

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> ChatTokens:
        return self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True)

    def _turn_by_mask(self, messages: Sequence[Message], place: int, tools: Sequence[Any] | None, through: ChatTokens) -> Turn:
        """By generation tags: the last marked run, up to the end-of-turn token where that stands just behind the tag."""
        ids, mask = through.ids, through.assistant_mask
        end = next((i + 1 for i in reversed(range(len(mask))) if mask[i]), 0)
        start = next((i + 1 for i in reversed(range(end)) if not mask[i]), 0)
        if place and messages[place - 1]["role"] == "assistant":  # the run may hold the turn before, too
            before = self._render(messages[:place], tools).ids
            if ids[:len(before)] != before:
                raise SampleError("two assistant turns in a row", "the template does not keep them apart")
            start = max(start, len(before))
        if start >= end:
            raise SampleError("the template marks nothing of the turn", "no token inside its generation tags")
        if ids[end - 1] not in self.tokenizer.eos_ids and end < len(ids) and ids[end] in self.tokenizer.eos_ids:
            end += 1
        extra = []
        if self._prompt_extra and place:
            prompt = self._prompt(messages[:place], tools).ids
            extra = prompt[start:] if prompt[:start] == ids[:start] else []
        return _join(ids[:start], extra, ids[start:end])

    def _turn_by_prefix(self, messages: Sequence[Message], place: int, tools: Sequence[Any] | None, through: list[int]) -> Turn:
        """Without tags: what the rendering through the turn has after the prompt, or after the turn's own header."""
        if place == 0:
            raise SampleError("the conversation begins with the assistant", "the template needs a message before it")
        prompt = self._prompt(messages[:place], tools).ids
        if through[:len(prompt)] == prompt:
            return Turn(prompt, through[len(prompt):])
        header = len(prompt) - len(self._prompt_extra)
        if not self._prompt_extra or prompt[header:] != self._prompt_extra or through[:header] != prompt[:header]:
            raise SampleError("the prompt is not a prefix of the rendered turn",
                              "the template changes earlier messages, or the answer's first characters merge with the header")
        return _join(prompt[:header], self._prompt_extra, through[header:])

    def _closed(self, turn: Turn, truncated: bool) -> Turn:
        """The turn without what the template writes behind its end-of-turn token."""
        ends = [place for place, token in enumerate(turn.response) if token in self.tokenizer.eos_ids]
        if not ends or self.tokenizer.decode(turn.response[ends[-1] + 1:]).strip():
            tail = self.tokenizer.decode(turn.response[-8:])
            raise SampleError("the turn has no end-of-turn token",
                              f"it ends in {tail!r}, the end tokens are {list(self.tokenizer.eos_ids)}; name the right one as eos_token_id "
                              "in the tokenizer's generation_config.json or with --eos-token-id")
        response = turn.response[:ends[-1] + (0 if truncated else 1)]
        # The beginning tells, as a rule, and decoding all of it costs.
        if not any(self.tokenizer.decode(part, skip_special_tokens=True).strip() for part in (response[:32], response)):
            raise SampleError("empty response", "the template writes nothing of it")
        return Turn(turn.prompt, response)

    def _probe_prompt(self, question: Sequence[Message], chats: Sequence[Sequence[Message]]) -> None:
        """Find what the generation prompt has beyond the header of a plain answer (usually nothing)."""
        prompt, through = self._prompt(question).ids, [self._render(chat) for chat in chats]
        header = _shared_length(through[0].ids, through[1].ids)
        mask = through[0].assistant_mask
        if mask is not None:
            marked = self.tokenizer.decode([token for token, inside in zip(through[0].ids, mask, strict=True) if inside])
            if PROBE_USER in marked:
                raise ValueError(f"tokenizer {self.tokenizer.name}: its chat template marks the user's words for learning, {marked!r}; "
                                 "correct its generation tags, or pass another template with --chat-template")
            header = mask.index(True) if True in mask else header
        elif all(rendering.ids[:len(prompt)] == prompt for rendering in through):
            return
        if prompt[:header] == through[0].ids[:header]:
            self._prompt_extra = prompt[header:]
        elif mask is None:
            raise ValueError(
                f"tokenizer {self.tokenizer.name}: its chat template has no generation tags, and the prompt "
                f"{self.tokenizer.decode(prompt)!r} is not the beginning of the whole turn {self.tokenizer.decode(through[0].ids)!r}, so "
                "the answer's tokens cannot be told apart; put {% generation %} ... {% endgeneration %} around the assistant's part of the "
                "template and pass it with --chat-template")
        else:
            self.notes.append(f"answers are trained behind {self.tokenizer.decode(through[0].ids[:header])!r}, "
                              f"but the generation prompt is {self.tokenizer.decode(prompt)!r}")
        if self._prompt_extra:
            self.notes.append(
                f"the template's generation prompt ends in {self.tokenizer.decode(self._prompt_extra)!r}, which is no part of its answers' "
                "headers; every prompt ends in it, as at generation, unless the answer opens that block with words of its own")

    def _check_probe(self, messages: Sequence[Message]) -> None:
        """The answer's words, and nothing of the question, must be in the response; the reverse in the prompt."""
        turn = self.turn(messages, 1)
        prompt, response = self.tokenizer.decode(turn.prompt), self.tokenizer.decode(turn.response)
        answer = messages[1]["content"]
        if PROBE_USER not in prompt or answer in prompt or PROBE_USER in response or answer not in response:
            raise ValueError(
                f"tokenizer {self.tokenizer.name}: its chat template does not part question and answer: prompt {prompt!r}, response "
                f"{response!r}; correct its generation tags, or pass another template with --chat-template")


def supervised_places(messages: Sequence[Message], supervise_turns: str) -> list[tuple[int, int]]:
    """(place among the messages, number among the assistant's turns, from 0) of each turn to learn, weight 0 (OpenAI's mark) left out."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = list(enumerate(turns))[-1:] if supervise_turns == "last" else list(enumerate(turns))
    return [(place, number) for number, place in chosen if messages[place].get("weight") != 0]


def _join(header: list[int], extra: list[int], response: list[int]) -> Turn:
    """A turn behind its header and what the generation prompt has beyond it.

    The extra goes in front, as at generation; a response that has it at its own start gives it up, and one that opens the same block with
    other contents (real thoughts) does without, since the block must not be closed before it.
    """
    if response[:len(extra)] == extra:
        return Turn(header + extra, response[len(extra):])
    if response[:1] == extra[:1]:
        return Turn(header, response)
    return Turn(header + extra, response)


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
