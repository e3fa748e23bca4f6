"""megatron_dllm.training.batches and evaluation: what draws hang on, and which rows an evaluation takes."""
import numpy as np
import pytest

from megatron_dllm.config import parse
from megatron_dllm.data.order import RowOrder
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.evaluation import evaluation_rows

EXAMPLES = 8


class Source:
    """Examples of 9 prompt and 9 response tokens."""

    keys = np.stack([np.arange(EXAMPLES) + 100, np.arange(EXAMPLES) % 3], axis=1)
    lengths, truncated = np.full((EXAMPLES, 2), 9), np.arange(EXAMPLES) == 5

    def tokens(self, index):
        return np.full(18, 5, np.int64)


def maker_of(stream, flags=""):
    run = parse(f"--preset toy --train-iters 4 --data-source sudoku --micro-batch-size 2 --global-batch-size 8 {flags}".split())
    return BatchMaker(run, Source(), RowOrder(np.full(EXAMPLES, 18), seed=1), stream, ParallelContext.single())


@pytest.mark.parametrize("stream", [Stream.TRAIN, Stream.EVALUATE])
def test_an_example_is_drawn_anew_in_every_epoch_of_training_alone(stream):
    """Rows come in another order too, so that other losses alone would say nothing of the draws."""
    maker = maker_of(stream)
    first, second = ({e.index: e for rank in maker.batch(range(start, start + EXAMPLES), 0).plan.microbatches
                      for microbatch in rank for e in microbatch.examples} for start in (0, EXAMPLES))
    assert first.keys() == second.keys() == set(range(EXAMPLES))
    for index, example in first.items():
        key, again = example.key, second[index].key
        assert (key.stream, key.epoch, key.sample, key.unit) == (stream, 0, 100 + index, index % 3)
        assert again.epoch == (stream is Stream.TRAIN) and (example.noise == second[index].noise) == (stream is Stream.EVALUATE)


@pytest.mark.parametrize(("asked", "taken"), [(1, 2), (2, 2), (5, 4), (8, 8), (100, 8)])
def test_an_evaluation_takes_whole_microbatches_of_one_pass_at_most(asked, taken):
    assert evaluation_rows(maker_of(Stream.EVALUATE), asked) == range(taken)


@pytest.mark.parametrize(("flags", "name", "usual", "value"), [
    ("--self-conditioning-null uniform", "uniform_null", False, True), ("--diffusion-loss reweighted-loo", "leave_one_out", False, True),
    ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.7", "mtp_scale", 0.1, 0.7)], ids=["null", "leave one out", "MTP"])
def test_flags_of_the_objective_reach_the_passes(flags, name, usual, value):
    assert getattr(maker_of(Stream.TRAIN).pass_options, name) == usual
    assert getattr(maker_of(Stream.TRAIN, flags).pass_options, name) == value


def test_adapters_with_dropout_are_given_draws():
    for rate in ("0", "0.25"):
        maker = maker_of(Stream.TRAIN, f"--lora-rank 2 --lora-dropout {rate}")
        inputs = maker.inputs(maker.batch(range(EXAMPLES), 0).plan, 0, 0)
        draws = inputs.first_pass.draws
        assert (draws is not None and draws.every is not None) == (rate != "0")
