#!/usr/bin/env python3
"""Generates text from a model: a run of ours, one of its checkpoints, or a transformers directory.

    python tools/generate.py --load runs/chat --prompt "Why is the sky blue?"
    python tools/generate.py --load runs/code --raw --prompt "def main():" --show-steps --gif canvas.gif
    python tools/generate.py --load models/diffusiongemma --prompt-file questions.txt --batch-size 16 --output answers.jsonl
    python tools/generate.py --load runs/chat --interactive

A prompt is a user's message where the tokenizer has a chat template, and else, or with --raw, a text to continue. --show-steps draws the
first prompt's canvases as they settle and writes them as a GIF.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

if find_spec("megatron_dllm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console  # noqa: E402

from megatron_dllm.config import GenerationConfig, format_problems, problems_of  # noqa: E402
from megatron_dllm.config.flags import HelpFormatter, flags_of, words_of  # noqa: E402
from megatron_dllm.data.tokenizers import Tokenizer  # noqa: E402
from megatron_dllm.diffusion.sampling_flashinfer import flashinfer_reader  # noqa: E402
from megatron_dllm.generation.completions import Completion, Speed  # noqa: E402
from megatron_dllm.generation.drawing import TerminalView, write_gif  # noqa: E402
from megatron_dllm.generation.film import Film  # noqa: E402
from megatron_dllm.generation.loaded import LoadedModel  # noqa: E402
from megatron_dllm.generation.text import chat_prompt, decode_tokens, has_chat_template, raw_prompt  # noqa: E402
from megatron_dllm.models.diffusion_gemma.loading import StoredModel  # noqa: E402
from megatron_dllm.parallel.initialize import choose_device  # noqa: E402
from megatron_dllm.transformer.rotary_flashinfer import use_flashinfer_rope  # noqa: E402

Messages = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when everything was generated, 2 for a mistake in what it was given."""
    arguments = parse(argv)
    try:
        prompts = [] if arguments.interactive else read_prompts(arguments)
        device = choose_device(arguments.device, local_rank=0)
        stored = StoredModel.open(arguments.load)
        sampler = sampler_of(stored, arguments)
        loaded = LoadedModel.load(stored, device, bf16=arguments.bf16)
        if arguments.use_flashinfer_fused_rope:
            use_flashinfer_rope(loaded.model, device)
        if arguments.sampling_backend == "flashinfer":
            loaded = replace(loaded, reader=flashinfer_reader(device))
        chat = not arguments.raw and has_chat_template(loaded.tokenizer)
        print(f"device: {device}; prompts are {'messages to the chat template' if chat else 'texts to continue'}", file=sys.stderr)
        print("sampler:", *words_of(sampler), file=sys.stderr)
        session = Generator(arguments, loaded, sampler, chat)
        session.converse() if arguments.interactive else session.answer(prompts)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage, description = __doc__.split("\n\n", 1)
    parser = argparse.ArgumentParser(usage="generate.py --load DIR (--prompt TEXT | --prompt-file FILE | --interactive) [FLAGS]",
                                     description=usage, epilog=description, allow_abbrev=False, formatter_class=Help)
    prompts = parser.add_argument_group("Prompts (one of these)").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="One prompt or several.")
    prompts.add_argument("--prompt-file", metavar="FILE", help="A prompt on each line, or in a .jsonl file an object with \"prompt\" or "
                         "\"messages\"; - is standard input.")
    prompts.add_argument("--interactive", action="store_true", help="Ask for prompts and keep the conversation; an empty line ends it.")
    model = parser.add_argument_group("Model")
    model.add_argument("--load", required=True, metavar="DIR", help="A run's folder, one of its checkpoints, or a transformers folder.")
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto, CUDA where torch sees a device)")
    model.add_argument("--bf16", action=argparse.BooleanOptionalAction,
                       help="Compute in bfloat16 or (--no-bf16) in fp32. (default: as trained; fp32 on a CPU)")
    model.add_argument("--use-flashinfer-fused-rope", action="store_true", help="Turn queries and keys by FlashInfer's kernel.")
    sampler = parser.add_argument_group("Sampler")
    sampler.add_argument("--seed", type=int, default=1234, metavar="N", help="Seed of all draws. (default: 1234)")
    sampler.add_argument("--batch-size", type=int, default=8, metavar="N", help="Prompts generated together. (default: 8)")
    sampler.add_argument("--sampling-backend", choices=("local", "flashinfer"), default="local",
                         help="Read logits by our kernel or by FlashInfer's, which draws other samples, as likely. (default: local)")
    settings = parser.add_argument_group("Sampler settings (left out, they are the run's own, or those of a transformers folder's "
                                         "generation_config.json)")
    for item in flags_of(GenerationConfig):
        replace(item, default=None).add_to(settings)
    output = parser.add_argument_group("Output")
    output.add_argument("--raw", action="store_true", help="Continue the prompt as plain text, without a chat template.")
    output.add_argument("--show-steps", action="store_true", help="Draw how the first prompt's canvases settle, and write a GIF of it.")
    output.add_argument("--gif", default="canvas.gif", type=Path, metavar="FILE", help="The GIF of --show-steps. (default: canvas.gif)")
    output.add_argument("--output", metavar="FILE", help="Also write every answer to this file, a JSON object a line.")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: must be at least 1")
    return arguments


class Help(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Two wide columns of flags, and the examples as they are typed."""


def sampler_of(stored: StoredModel, arguments: argparse.Namespace) -> GenerationConfig:
    """The model's own settings with the given ones in their place; ValueError for what cannot work, before any weight is read."""
    given = {item.field: getattr(arguments, item.field) for item in flags_of(GenerationConfig) if item.field in arguments}
    sampler = replace(stored.sampler, **given)
    if problems := problems_of(sampler):
        raise ValueError(format_problems(problems))
    return sampler


def read_prompts(arguments: argparse.Namespace) -> list[str | Messages]:
    """The prompts of --prompt or --prompt-file; ValueError names the line that cannot be read."""
    if arguments.prompt:
        return list(arguments.prompt)
    name = arguments.prompt_file
    lines = sys.stdin.read().splitlines() if name == "-" else Path(name).read_text(encoding="utf-8").splitlines()
    prompts = [_read_line(line, f"{name}:{number}") if name.endswith(".jsonl") else line
               for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{name} holds no prompt; write one on each line")
    return prompts


def _read_line(line: str, where: str) -> str | Messages:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}; write an object with \"prompt\" or \"messages\" on each line") from None
    if isinstance(row, Mapping) and isinstance(row.get("messages"), list):
        return row["messages"]
    if isinstance(row, Mapping) and isinstance(row.get("prompt"), str):
        return row["prompt"]
    raise ValueError(f'{where} is no object with a "prompt" or with "messages"; write {{"prompt": "..."}}')


@dataclass
class Generator:
    """The tool at work: a model, how prompts become tokens, and where answers go."""

    arguments: argparse.Namespace
    loaded: LoadedModel
    sampler: GenerationConfig
    chat: bool
    console: Console = field(default_factory=Console)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def tokens_of(self, prompt: str | Messages) -> list[int]:
        """The tokens that the model continues."""
        if self.chat:
            return chat_prompt(self.tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if not isinstance(prompt, str):
            raise ValueError("messages need a chat template; give plain prompts, leave --raw out, or take a tokenizer with a template")
        return raw_prompt(self.tokenizer, prompt)

    def answer(self, prompts: Sequence[str | Messages]) -> None:
        """Generate for every prompt and print as batches come; then the figures."""
        output = open(self.arguments.output, "w", encoding="utf-8") if self.arguments.output else nullcontext()
        started, completions = time.perf_counter(), []
        with output as file:
            for prompt, completion in zip(prompts, self.complete([self.tokens_of(p) for p in prompts]), strict=True):
                completions.append(completion)
                self.show(prompt, completion, file)
        print(self.figures(completions, time.perf_counter() - started))

    def complete(self, prompts: Sequence[Sequence[int]]) -> Iterator[Completion]:
        """Completions in order; the first is drawn while it settles if --show-steps says so."""
        arguments, film = self.arguments, None
        if arguments.show_steps:
            film = Film(self.tokenizer, prompts[0], self.loaded.ends.eos_ids)
        view = TerminalView(self.console, "prompt 1") if film else nullcontext()
        completions = self.loaded.complete(
            prompts, self.sampler, seed=arguments.seed, batch_size=arguments.batch_size, observe=lambda first: film if first == 0 else None)
        with view:
            if film is not None:
                film.on_frame = view.show
            first = next(completions)
        if film is not None:
            write_gif(arguments.gif, film.frames)
            print(f"wrote {arguments.gif}: {len(film.frames)} steps", file=sys.stderr)
        yield first
        yield from completions

    def text_of(self, completion: Completion) -> str:
        return decode_tokens(self.tokenizer, completion.tokens, skip_special_tokens=True)

    def show(self, prompt: str | Messages, completion: Completion, file: TextIO | None) -> None:
        """Print an answer under its prompt, and write it to --output."""
        shown = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
        self.console.print(f"> {shown}", style="bold", markup=False, highlight=False)
        self.console.print(self.text_of(completion), markup=False, highlight=False)
        self.console.print()
        if file is not None:
            row = {"prompt": prompt, "completion": self.text_of(completion), "tokens": list(completion.tokens),
                   "steps": list(completion.steps), "ended": completion.ended}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

    def figures(self, completions: Sequence[Completion], seconds: float) -> str:
        """One line: how much was generated, and how fast."""
        speed = Speed.of(completions, self.loaded.ends.pad_id)
        return (f"{len(completions)} answers, {speed.num_tokens} tokens, {speed.tokens_per_forward:.2f} tokens per forward, "
                f"{speed.effective_steps:.1f} effective steps a canvas, {speed.num_tokens / seconds:.1f} tokens/s")

    def converse(self) -> None:
        """Prompts from the terminal until an empty line or the end of input; in a chat the model sees the whole conversation."""
        messages: Messages = []
        while text := self._ask():
            turn = [*messages, {"role": "user", "content": text}]
            try:
                started = time.perf_counter()
                (completion,) = self.complete([self.tokens_of(turn if self.chat else text)])
            except ValueError as error:  # too long, say: the conversation goes on without this turn
                print(f"error: {error}", file=sys.stderr)
                continue
            answer = self.text_of(completion)
            self.console.print(answer, markup=False, highlight=False)
            print(self.figures([completion], time.perf_counter() - started), file=sys.stderr)
            messages = [*turn, {"role": "assistant", "content": answer}]

    def _ask(self) -> str:
        try:
            return input("> ").strip("\n")
        except EOFError:
            return ""


if __name__ == "__main__":
    sys.exit(main())
