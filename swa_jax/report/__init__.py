"""Pictures, and every table that a terminal shows. They take plain numbers; nothing here measures anything.

Every picture is a PNG, written whole or not at all, without a display. `style` is the one style of all of them.
"""

from swa_jax.report.heat_maps import (
    head_map,
    layer_ratio_map,
    loss_heat_map,
    needle_heat_map,
    ruler_heat,
    sweep_heat,
)
from swa_jax.report.layer_charts import layer_scores_chart, routing_chart
from swa_jax.report.line_charts import routed_cpt_chart, training_curves
from swa_jax.report.memory_charts import accuracy_memory_chart, frontier_chart
from swa_jax.report.tables import compare_table, pattern_table, table_console

wide_console = table_console  # its earlier name

__all__ = [
    "accuracy_memory_chart",
    "compare_table",
    "frontier_chart",
    "head_map",
    "layer_ratio_map",
    "layer_scores_chart",
    "loss_heat_map",
    "needle_heat_map",
    "pattern_table",
    "routed_cpt_chart",
    "routing_chart",
    "ruler_heat",
    "sweep_heat",
    "table_console",
    "training_curves",
    "wide_console",
]
