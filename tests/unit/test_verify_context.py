"""The context suite's own arithmetic: cosines of gradients, and hidden blocks as they are counted."""
import gc
import math
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tools"), str(Path(__file__).parents[2])]

from benchmarking.workload import real_width, toy_width  # noqa: E402
from verification import context  # noqa: E402
from verification.context import Cosines, Rows, cosines  # noqa: E402
from verification.hidden_keys import KEYS, QUERIES, seen_of  # noqa: E402

from megatron_dllm.models.diffusion_gemma.build import build_model  # noqa: E402
from megatron_dllm.parallel import Group, ParallelContext  # noqa: E402


def test_cosines_of_the_whole_and_of_the_worst_tensor():
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([0.0, 4.0]), "none": torch.zeros(2)}
    other = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([4.0, 0.0]), "none": torch.zeros(2)}
    assert cosines(a, other) == cosines(other, a) == Cosines(9 / 25, 0.0, "y")
    assert cosines(a, {key: 2 * value for key, value in a.items()}).whole == pytest.approx(1.0)
    assert math.isnan(cosines({"x": torch.tensor([math.nan])}, {"x": torch.ones(1)}).whole)


def test_hidden_keys():
    """The first half of every rank's queries sees rank 0's keys alone."""
    ours, others = (seen_of(holder, 2).dense().reshape(2, QUERIES, KEYS) for holder in (0, 1))
    assert ours.all() and not others[:, :QUERIES // 2].any() and others[:, QUERIES // 2:].all()


def test_the_packages_documents_come_in_few_shapes():
    """A chunk of every document; biases of the first pass and of the second."""
    model = replace(real_width(context.TWO), global_kv_channels=256, canvas_length=context.CANVAS["transformer_engine"])
    single = ParallelContext.single()
    for rank in range(2):
        of_two = replace(single, cp=Group("cp", 2, rank, None, (0, 1)))
        suite = context.Suite(of_two, False, ["transformer_engine"], model, 0.0)
        run = suite.run_of(model, 2, "transformer_engine", seq_length=4096, rows=2).with_values(self_conditioning_prob=1.0)
        rows, chunks, biases = Rows(context.UNEQUAL["transformer_engine"], model.vocab_size), set(), set()
        for step in range(3):
            (inputs,) = context.inputs_of(run, of_two, rows, [2 * step, 2 * step + 1])
            for plan in (layer.attention for tokens in (inputs.first_pass, inputs.second_pass) for layer in tokens.layers.values()):
                chunks |= {document.chunk for document in plan.stationary.documents} if plan.stationary else set()
                biases.add(tuple(plan.replicated.bias.shape))
        assert (chunks, biases) == ({128}, {(64, 1024), (64, 768)})


def test_no_model_is_kept_while_the_next_is_built(monkeypatch):
    """At real widths each takes some 30 GiB with its gradients, and a reference's gradients 20 more."""
    models, kept = [], []

    def building(*inputs, **options):
        gc.collect()
        kept.append(sum(model() is not None for model in models))
        model = build_model(*inputs, **options)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(context, "build_model", building)
    suite = context.Suite(ParallelContext.single(), True, ["local"], toy_width(["full"]), 0.0)
    figures = list(suite.steps())
    assert kept == [0] * 4 and all(figure.value == 0 for figure in figures if "loss" in figure.name) and len(figures) == 6


def test_rows_are_documents_of_their_lengths():
    rows = Rows(((3, 20), (1, 1)), 100)
    assert [len(rows.tokens(index)) for index in range(len(rows))] == [23, 2] == rows.lengths.sum(1).tolist()
    assert rows.keys.tolist() == [[0, 0], [1, 0]] and not rows.truncated.any()
