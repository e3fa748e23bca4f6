"""megatron_dllm.diffusion.inputs under context parallelism, without processes: the ranks' inputs are the whole's, shared out."""
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from megatron_dllm.config import ObjectiveConfig
from megatron_dllm.context_parallel.layout import ContextSplit
from megatron_dllm.diffusion.inputs import to_device
from megatron_dllm.diffusion.passes import PassOptions, microbatch_inputs
from megatron_dllm.diffusion.streams import build_streams
from tests.unit.toy import CONFIG, LENGTHS, toy_plan, toy_tokens

COMM_TYPES = {"sliding": "halo", "full": "p2p"}


def streams_of(objective, lengths=LENGTHS):
    plan = toy_plan(objective, lengths, packed=True)
    chosen = plan.microbatches[0][0]
    tokens = [toy_tokens(e.index, e.fit.prompt + e.fit.response) for e in chosen.examples]
    return build_streams(chosen, tokens, objective, plan.denominators, vocab_size=CONFIG.vocab_size, fill_token=CONFIG.fill_token_id)


def inputs_of(streams, split=ContextSplit(), config=CONFIG, **options):  # noqa: B008 (immutable)
    return microbatch_inputs(streams, config, PassOptions(torch.float64, context_split=split), **options)


def scored(inputs):
    """(target, weight, group) of every scored token, over both passes, sorted."""
    passes = [s for s in (inputs.first_scored, inputs.second_scored) if s is not None]
    return sorted(zip(*(torch.cat([getattr(s, name) for s in passes]).tolist() for name in ("targets", "weights", "group")), strict=True))


OBJECTIVES = {
    "one": ObjectiveConfig(), "all": ObjectiveConfig(canvases_scored="all"), "always": ObjectiveConfig(self_conditioning_prob=1.0),
    "never": ObjectiveConfig(self_conditioning_prob=0.0), "causal": ObjectiveConfig(objective="ar")}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_tokens_and_weights_are_shared_out(objective, ranks):
    streams = streams_of(objective)
    whole = inputs_of(streams)
    parts = [inputs_of(streams, ContextSplit(rank, ranks, objective.canvases_scored == "all", COMM_TYPES)) for rank in range(ranks)]
    for tokens in ("clean", "canvas"):
        own = torch.cat([getattr(part, tokens).tokens for part in parts])
        assert torch.equal(own.sort().values, getattr(whole, tokens).tokens.sort().values)
    assert sorted(torch.cat([part.second_tokens for part in parts]).tolist()) == sorted(whole.second_tokens.tolist())
    assert sorted(sum((scored(part) for part in parts), start=[])) == scored(whole)
    # Every rank runs a second loop if any of them has to.
    assert {part.second_pass is None for part in parts} == {whole.second_pass is None}
    for part in parts:
        assert part.first_pass.num_tokens == len(part.clean.tokens) + len(part.canvas.tokens)
        assert len(part.draft_rows) == len(part.second_tokens) and (part.draft_rows >= part.first_pass.num_clean).all()


def test_what_is_kept_is_shared_out():
    streams = streams_of(OBJECTIVES["always"])
    whole, parts = inputs_of(streams), [inputs_of(streams, ContextSplit(rank, 2, False, COMM_TYPES)) for rank in range(2)]
    for kind in COMM_TYPES:
        kept = [len(part.first_pass.layers[kind].kept) for part in parts]
        assert sum(kept) == len(whole.first_pass.layers[kind].kept) and min(kept) > 0
        assert [part.second_pass.layers[kind].attention.num_held for part in parts] == kept


def test_a_second_loop_of_nothing():
    """Because a rank that shares experts has one."""
    part = inputs_of(streams_of(OBJECTIVES["never"]), ContextSplit(1, 2, False, COMM_TYPES), second_loop=True)
    assert part.second_pass.num_tokens == 0 and part.second_pass.layers["full"].attention.replicated is None


def test_inputs_travel():
    """Through a loader's pipe and onto a device."""
    part = inputs_of(streams_of(OBJECTIVES["always"]), ContextSplit(0, 2, False, COMM_TYPES))
    again = to_device(pickle.loads(pickle.dumps(part)), torch.device("cpu"))
    plan, same = (x.first_pass.layers["full"].attention for x in (part, again))
    assert type(same.stationary) is type(plan.stationary) and same.stationary.num_held == plan.stationary.num_held
    meetings = list(zip(plan.stationary.meetings, same.stationary.meetings, strict=True))
    assert meetings and all(torch.equal(a.partial.bounds, b.partial.bounds) and a.send.distinct == b.send.distinct for a, b in meetings)


def test_inputs_of_one_rank_are_unchanged():
    """A split over one rank gives the plain inputs, whatever its other settings are."""
    streams = streams_of(OBJECTIVES["all"])
    plain, split = inputs_of(streams), inputs_of(streams, dataclasses.replace(ContextSplit(), whole_canvases=True, comm_types=COMM_TYPES))
    assert np.array_equal(plain.clean.tokens, split.clean.tokens) and np.array_equal(plain.canvas.tokens, split.canvas.tokens)
    assert type(plain.first_pass.layers["full"].attention) is type(split.first_pass.layers["full"].attention)
