#!/usr/bin/env python3
"""Measures a model: losses by noise level, and the quality of what it generates.

    python tools/evaluate.py --load runs/chat                                  losses and exact match on the run's validation data
    python tools/evaluate.py --load runs/sudoku --on test --generate 500 --score sudoku --at-least 0.95
    python tools/evaluate.py --load MODEL_DIR --data-path test.jsonl --split 0.1,0,99.9 --on test --score "regex:#### (-?[0-9]+)"
    python tools/evaluate.py --load runs/code --generate 50 --score my_module:compiles --output result.json --answers answers.jsonl

--load takes a run's folder or checkpoint, whose own flags then hold (data, objective, sampler), or a transformers directory. Any flag of
pretrain_dllm.py may follow and replaces the run's. Precision is that of training, but fp32 on a CPU, unless --bf16 or --no-bf16 follows.
A score is exact, sudoku, regex:PATTERN (its last match's group must be the reference's; without a group it must match) or
module:function, a function of an Answer (megatron_dllm.generation.quality).
"""
from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("megatron_dllm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from megatron_dllm.checkpoint import store  # noqa: E402
from megatron_dllm.config import ParallelConfig, RunConfig, check_against_checkpoint, format_problems, validate  # noqa: E402
from megatron_dllm.config import parse as parse_run  # noqa: E402
from megatron_dllm.config.flags import words_of  # noqa: E402
from megatron_dllm.data.build import build_sources, build_tokenizer  # noqa: E402
from megatron_dllm.data.source import ExampleSource  # noqa: E402
from megatron_dllm.diffusion.random import Stream  # noqa: E402
from megatron_dllm.generation.completions import Completion, Speed  # noqa: E402
from megatron_dllm.generation.loaded import LoadedModel  # noqa: E402
from megatron_dllm.generation.quality import Answer, Example, Score, choose_examples, open_score  # noqa: E402
from megatron_dllm.models.diffusion_gemma.loading import StoredModel  # noqa: E402
from megatron_dllm.parallel.initialize import choose_device  # noqa: E402
from megatron_dllm.training.batches import BatchMaker  # noqa: E402
from megatron_dllm.training.evaluation import evaluate  # noqa: E402

SPLITS = ("train", "valid", "test")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when everything was measured, 1 when a score is below --at-least, 2 for a mistake in what was given."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments, flags = parse(argv)
    try:
        result = measure(arguments, flags)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return print_result(result, arguments.at_least)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and the rest: those of pretrain_dllm.py."""
    summary, details = __doc__.split("\n\n", 1)
    usage = "evaluate.py --load DIR [FLAGS] [FLAGS OF pretrain_dllm.py]"
    parser = argparse.ArgumentParser(usage=usage, description=summary, epilog=details,
                                     allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="a run's folder, one of its checkpoints, or a transformers folder")
    add("--on", choices=SPLITS, default="valid", help="which part of the data (default: valid)")
    add("--losses", type=int, default=512, metavar="N", help="examples whose losses are measured; 0: none (default: 512)")
    add("--generate", type=int, default=64, metavar="N", help="examples whose prompts are answered; 0: none (default: 64)")
    add("--score", action="append", metavar="NAME", help="how answers are scored; may be given again (default: exact)")
    add("--at-least", type=float, metavar="X", help="share of right answers that every score must reach; status 1 when one does not")
    add("--batch-size", type=int, default=8, metavar="N", help="examples that go through the model together (default: 8)")
    add("--output", metavar="FILE", help="write the results as JSON")
    add("--answers", metavar="FILE", help="write every answer with its scores, a JSON object a line")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: must be at least 1")
    return arguments, flags


def measure(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Everything that was asked for, ready for JSON; ValueError for what the user can mend."""
    scores = {name: open_score(name) for name in arguments.score or ["exact"]}
    stored = StoredModel.open(arguments.load)
    run = configure(stored, arguments, flags)
    told = {"--bf16", "--no-bf16"} & set(flags)
    loaded = LoadedModel.load(stored, choose_device(run.training.device, local_rank=0), bf16=run.training.bf16 if told else None)
    problems = check_against_checkpoint(run, loaded.model.config)
    if problems:
        raise ValueError(format_problems(problems))
    if run.data.makes_examples:
        loaded = LoadedModel(loaded.model, build_tokenizer(run.data, run.model.eos_token_id))
    source = getattr(build_sources(run.data, run.model, loaded.tokenizer, seed=run.training.seed), arguments.on)
    if source is None:
        raise ValueError(f"--on {arguments.on}: --split {run.data.split} leaves no example there; choose another part or another --split")
    print(f"device: {loaded.model.context.device}; {source.name}, {arguments.on}: {len(source)} examples", file=sys.stderr)
    result: dict[str, Any] = {"model": str(arguments.load), "data": source.name, "split": arguments.on}
    if arguments.losses:
        result["losses"] = evaluate_losses(run, loaded, source, arguments.losses)
    if arguments.generate:
        result["generation"] = evaluate_generation(run, loaded, source, scores, arguments)
    return result


def configure(stored: StoredModel, arguments: argparse.Namespace, flags: Sequence[str]) -> RunConfig:
    """The model's own configuration with the given flags on top, on one process, at the model's full canvas length."""
    if stored.checkpoint is None:
        words = ["--pretrained-checkpoint", arguments.load, "--train-iters", "1", *words_of(stored.sampler)]
    else:
        words = [f"@{stored.checkpoint.path / store.ARGUMENTS}"]
    run = parse_run([*words, *flags])
    size = arguments.batch_size
    run = replace(run, parallel=ParallelConfig()).with_values(
        load=arguments.load, canvas_length_schedule="", micro_batch_size=size, global_batch_size=size)
    problems = validate(run)
    if problems:
        raise ValueError(format_problems(problems))
    return run


def evaluate_losses(run: RunConfig, loaded: LoadedModel, source: ExampleSource, num_examples: int) -> dict[str, float]:
    """Mean losses over the first examples, apart and by noise level, on fixed draws: the same numbers every time."""
    return evaluate(loaded.model, BatchMaker.of(run, source, Stream.EVALUATE, loaded.model.context), num_examples)


def evaluate_generation(run: RunConfig, loaded: LoadedModel, source: ExampleSource, scores: Mapping[str, Score],
                        arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer the first prompts that fit and score the answers. No answer is longer than the longest reference, in whole canvases."""
    if not run.objective.has_canvases:
        raise ValueError("a model trained with --objective ar has no canvases to denoise; set --generate 0")
    examples, left_out = choose_examples(run, source, arguments.generate)
    longest = max(len(example.reference) for example in examples)
    config = replace(run.generation, max_new_tokens=min(run.generation.max_new_tokens, longest))
    started, completions, answers = time.perf_counter(), [], []
    ordered = loaded.complete([e.prompt for e in examples], config, seed=run.training.seed, batch_size=arguments.batch_size)
    for example, completion in zip(examples, track(ordered, "answering", len(examples), console=Console(stderr=True)), strict=True):
        completions.append(completion)
        answers.append(Answer(example.prompt, completion.tokens, example.reference, loaded.tokenizer))
    seconds = time.perf_counter() - started
    verdicts = {name: [bool(score(answer)) for answer in answers] for name, score in scores.items()}
    if arguments.answers:
        write_answers(Path(arguments.answers), source, examples, answers, completions, verdicts)
    speed = Speed.of(completions, loaded.ends.pad_id)
    return {
        "examples": len(examples), "left_out": left_out,
        "scores": {name: {"right": sum(right), "share": sum(right) / len(right)} for name, right in verdicts.items()},
        "tokens": speed.num_tokens, "tokens_per_forward": speed.tokens_per_forward, "effective_steps": speed.effective_steps,
        "ended": sum(c.ended for c in completions) / len(completions), "seconds": seconds, "tokens_per_second": speed.num_tokens / seconds}


def write_answers(path: Path, source: ExampleSource, examples: Sequence[Example], answers: Sequence[Answer],
                  completions: Sequence[Completion], verdicts: Mapping[str, Sequence[bool]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i, (example, answer, completion) in enumerate(zip(examples, answers, completions, strict=True)):
            row = {"example": source.describe(example.index), "prompt": answer.prompt_text, "answer": answer.generated_text,
                   "reference": answer.reference_text, "steps": list(completion.steps),
                   **{name: right[i] for name, right in verdicts.items()}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def print_result(result: Mapping[str, Any], at_least: float | None) -> int:
    """The table; 1 when a score is below `at_least`."""
    table = Table("figure", "value", title=f"{result['model']} on {result['data']}, {result['split']}", title_justify="left")
    for name, value in figures_of(result):
        table.add_row(name, value)
    Console().print(table)
    scores = result.get("generation", {}).get("scores", {})
    missed = [name for name, score in scores.items() if at_least is not None and not score["share"] >= at_least]
    for name in missed:
        print(f"MISSED: {name} {scores[name]['share']:.4f} is below {at_least}")
    return int(bool(missed))


def figures_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of every line of the table, scores last."""
    for name, value in result.get("losses", {}).items():
        yield name.replace("_", " "), f"{value:.4f}"
    generation = result.get("generation")
    if generation is None:
        return
    yield "answers", str(generation["examples"]) + (f" ({generation['left_out']} prompts too long)" if generation["left_out"] else "")
    yield "ended by themselves", f"{generation['ended']:.1%}"
    yield "tokens per second", f"{generation['tokens_per_second']:.1f}"
    yield "tokens per forward", f"{generation['tokens_per_forward']:.2f}"
    yield "effective steps a canvas", f"{generation['effective_steps']:.1f}"
    for name, score in generation["scores"].items():
        yield f"right answers: {name}", f"{score['right']} of {generation['examples']}, {score['share']:.1%}"


if __name__ == "__main__":
    sys.exit(main())
