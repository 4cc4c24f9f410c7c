"""Pictures, and every table that a terminal shows. They take plain numbers; nothing here measures anything.

Every picture is a PNG file, written whole or not at all, without a display; some also go into a page, as SVG. `style`
is the one style of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
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
    from swa_jax.report.memory_charts import accuracy_memory_chart, candidates_chart, frontier_chart
    from swa_jax.report.tables import compare_table, pattern_table, table_console

__all__ = [
    "accuracy_memory_chart",
    "candidates_chart",
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
]

__getattr__ = lazy(
    __name__,
    {
        "accuracy_memory_chart": "memory_charts",
        "candidates_chart": "memory_charts",
        "compare_table": "tables",
        "frontier_chart": "memory_charts",
        "head_map": "heat_maps",
        "layer_ratio_map": "heat_maps",
        "layer_scores_chart": "layer_charts",
        "loss_heat_map": "heat_maps",
        "needle_heat_map": "heat_maps",
        "pattern_table": "tables",
        "routed_cpt_chart": "line_charts",
        "routing_chart": "layer_charts",
        "ruler_heat": "heat_maps",
        "sweep_heat": "heat_maps",
        "table_console": "tables",
        "training_curves": "line_charts",
    },
)
