"""What the training loop gives to its parts, where a wrong number would train on quietly or stand still on several ranks alone."""
import dataclasses

import pytest

from megatron_dllm.config import parse
from megatron_dllm.diffusion.random import Stream
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training import loop
from megatron_dllm.training.batches import BatchMaker
from megatron_dllm.training.loop import Trainer
from tests.unit.test_training_run import FLAGS


def test_steps_take_the_learning_rates_that_are_logged(monkeypatch):
    trainer = Trainer.build(parse([*FLAGS, "--train-iters", "4", "--lr-warmup-iters", "2"]), ParallelContext.single())
    taken, step = [], loop.train_step

    def noted(model, optimizer, inputs, lr, **options):
        taken.append(lr)
        return step(model, optimizer, inputs, lr, **options)

    monkeypatch.setattr(loop, "train_step", noted)
    trainer.fit()
    assert taken == [trainer.schedule.at(iteration) for iteration in range(4)] and taken[:3] == sorted(set(taken))


def test_parameters_are_whole_before_an_evaluation(monkeypatch):
    """With --overlap-param-gather they come while the next step's forward runs."""
    flags = [*FLAGS, "--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1"]
    trainer = Trainer.build(parse(flags), ParallelContext.single())
    order, evaluate = [], loop.evaluate
    monkeypatch.setattr(type(trainer.optimizer), "finish_gathers", lambda self: order.append("gathered"))
    monkeypatch.setattr(loop, "evaluate", lambda *given: order.append("evaluated") or evaluate(*given))
    trainer.fit()
    assert order[:2] == ["gathered", "evaluated"]


def of_two(group):
    return dataclasses.replace(group, size=2, ranks=(0, 1))


@pytest.mark.parametrize("axis", ["ep", "etp", "pp"])
def test_ranks_that_meet_in_a_loop_all_run_it(axis):
    """A microbatch without a draft, beside another rank's with one: without the loop the other would wait for ever."""
    run = parse([*FLAGS, "--train-iters", "1", "--micro-batch-size", "1", "--self-conditioning-prob", "0.5", "--draft-pass",
                 "shared"])
    alone = ParallelContext.single()
    source = Trainer.build(run, alone).train.source
    two = dataclasses.replace(alone, dp=of_two(alone.dp))

    def inputs(context):
        maker = BatchMaker.of(run, source, Stream.TRAIN, context)
        for start in range(0, 40, 4):
            plan = maker.batch(range(start, start + 4), start // 4).plan
            for number in range(2):
                drafted = [rank[number].self_conditioned for rank in plan.microbatches]
                if len(set(drafted)) == 2:
                    return maker.inputs(plan, drafted.index(False), number)
        raise AssertionError("no two microbatches are unlike")

    assert inputs(two).second_pass is None
    meeting = inputs(dataclasses.replace(two, **{axis: of_two(getattr(two, axis))}))
    assert meeting.second_pass is not None and meeting.second_pass.num_tokens == 0
