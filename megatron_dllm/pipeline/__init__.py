"""Pipeline parallelism: stage layouts, schedules as data, and what checks them before they run."""

from megatron_dllm.pipeline.actions import Action, Edge, Kind
from megatron_dllm.pipeline.assembly import Schedule, build_schedule
from megatron_dllm.pipeline.edges import EdgeShape, EdgeShapes
from megatron_dllm.pipeline.graph import Pipeline
from megatron_dllm.pipeline.layout import LayoutError, Stage, StageLayout, derive_layout, parse_layout
from megatron_dllm.pipeline.simulator import Simulation, simulate
from megatron_dllm.pipeline.timing import Costs

__all__ = [
    "Action",
    "Costs",
    "Edge",
    "EdgeShape",
    "EdgeShapes",
    "Kind",
    "LayoutError",
    "Pipeline",
    "Schedule",
    "Simulation",
    "Stage",
    "StageLayout",
    "build_schedule",
    "derive_layout",
    "parse_layout",
    "simulate",
]
