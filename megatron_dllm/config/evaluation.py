"""What is measured while a run trains, and how often."""

from dataclasses import dataclass

from megatron_dllm.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation while training"""

    eval_interval: int | None = flag("Steps between evaluations; without it there is none.", None)
    eval_iters: int = flag("Batches of one evaluation.", 10)
    eval_generations: int | None = flag(
        "Prompts of the validation data that each evaluation answers, on all ranks alike, and scores by --eval-score; without it none.",
        None,
    )
    eval_score: str = flag(
        "How those answers are scored: exact, sudoku, regex:PATTERN (whose last group must be the reference's) or module:function.", "exact"
    )
