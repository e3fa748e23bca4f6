"""Rows to examples of token ids, in this process or in several; the result is the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from .formats import Conversation, Format, PlainText, Row
from .report import Origin, SampleError
from .templates import TurnRenderer, supervised_places
from .tokenizers import Tokenizer

ROWS_PER_TASK = 64
TASKS_PER_WORKER = 4  # that wait or run: enough to keep a worker busy while results are written


@dataclass(frozen=True)
class Job:
    """Row `number` of a source, in its format."""

    number: int
    origin: Origin
    form: Format
    row: Row


@dataclass(frozen=True)
class Example:
    """An example before it is stored: `unit` is the number of the assistant's turn (0 for a text), ids are int32."""

    unit: int
    prompt: np.ndarray
    response: np.ndarray
    truncated: bool


@dataclass
class EncodedRow:
    """What a row gave: its examples, and (where, error) for the row or those of its turns that cannot be used."""

    number: int
    origin: Origin
    examples: list[Example] = field(default_factory=list)
    skipped: list[tuple[str, SampleError]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # about the chat template, equal for every row that it rendered


class RowEncoder:
    """Makes the examples of one row at a time."""

    def __init__(self, tokenizer: Tokenizer, supervise_turns: str):
        self.tokenizer = tokenizer
        self.supervise_turns = supervise_turns
        self._renderer: TurnRenderer | None = None  # made for the first conversation: plain texts need no template

    def encode(self, job: Job) -> EncodedRow:
        """The examples of a row. What is wrong with the row alone is returned; ValueError for a chat template that cannot be cut."""
        result = EncodedRow(job.number, job.origin)
        try:
            sample = job.form.read(job.row)
            if isinstance(sample, PlainText):
                result.examples.append(self._document(sample))
            else:
                self._add_turns(sample, result)
        except SampleError as error:
            result.skipped.append((str(job.origin), error))
        return result

    def _document(self, sample: PlainText) -> Example:
        """A text is all response, behind the token that begins a text and before the one that ends it."""
        if not sample.text.strip():
            raise SampleError("empty response")
        prompt = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        end = [] if sample.truncated else [self.tokenizer.eos_ids[0]]
        return _example(0, prompt, self.tokenizer.encode(sample.text) + end, sample.truncated)

    def _add_turns(self, sample: Conversation, result: EncodedRow) -> None:
        """Each supervised turn; one that cannot be used is skipped alone."""
        places = supervised_places(sample.messages, self.supervise_turns)
        if not places:
            raise SampleError("no assistant turn", f"its roles are {', '.join(message['role'] for message in sample.messages)}")
        if self._renderer is None:
            self._renderer = TurnRenderer(self.tokenizer)
        result.notes = self._renderer.notes
        last = len(sample.messages) - 1
        for place, number in places:
            truncated = sample.truncated and place == last
            try:
                turn = self._renderer.turn(sample.messages, place, sample.tools, truncated=truncated)
            except SampleError as error:
                result.skipped.append((f"{result.origin} turn {number + 1}", error))
            else:
                result.examples.append(_example(number, turn.prompt, turn.response, truncated))


def encode_rows(jobs: Iterable[Job], encoder: RowEncoder, *, num_workers: int) -> Iterator[EncodedRow]:
    """The examples of each row, in order; below 2 workers in this process."""
    if num_workers < 2:
        yield from map(encoder.encode, jobs)
        return
    # Spawned: a tokenizer of transformers that has run threads does not survive a fork.
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"), initializer=_keep_encoder, initargs=(encoder,))
    try:
        waiting: deque[Future[list[EncodedRow]]] = deque()
        for task in _tasks(jobs):
            waiting.append(pool.submit(_encode_task, task))
            if len(waiting) >= TASKS_PER_WORKER * num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# Filled once in each worker process, so that the tokenizer is not sent with every task; stays empty in this one.
_ENCODER_OF_WORKER: list[RowEncoder] = []


def _keep_encoder(encoder: RowEncoder) -> None:
    _ENCODER_OF_WORKER.append(encoder)


def _encode_task(jobs: Sequence[Job]) -> list[EncodedRow]:
    return [_ENCODER_OF_WORKER[0].encode(job) for job in jobs]


def _tasks(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    task: list[Job] = []
    for job in jobs:
        task.append(job)
        if len(task) == ROWS_PER_TASK:
            yield task
            task = []
    if task:
        yield task


def _example(unit: int, prompt: Sequence[int], response: Sequence[int], truncated: bool) -> Example:
    return Example(unit, np.asarray(prompt, np.int32), np.asarray(response, np.int32), truncated)
