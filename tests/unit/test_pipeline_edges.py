"""Shape and dtype of edges."""

import pytest

from megatron_dllm.pipeline.actions import parse_action
from megatron_dllm.pipeline.edges import EdgeShape, EdgeShapes

SHAPES = EdgeShapes(64, ((50, 0), (70, 16)), mhc_num_residual_streams=4, dtype="float32")


@pytest.mark.parametrize(
    "token, tokens, width",
    [
        ("Sh0.0>1", 50, 256),
        ("Rh1.1<0", 70, 256),
        ("Rh1.1'<0", 16, 256),
        ("Sg1.1'>0!", 16, 256),
        ("Ss1.1>0", 16, 64),  # its sender stands in loop 0, its rows are those of loop 1
        ("Rs1.0'<1", 16, 64),
        ("Sd1.0'>1", 16, 64),
        ("Rd1.1<0", 16, 64),
    ],
)
def test_edge_shapes_of(token, tokens, width):
    assert SHAPES.of(parse_action(token)) == EdgeShape(tokens, width, "float32")


def test_edge_shapes_of_a_compute_step_is_our_mistake():
    with pytest.raises(AssertionError, match="F0.0 is no transfer"):
        SHAPES.of(parse_action("F0.0"))


def test_edge_shape_prints_and_counts():
    assert str(EdgeShape(3, 8, "bfloat16")) == "[3, 8] bfloat16"
    assert EdgeShape(3, 8, "bfloat16").size == 24
