"""What a run would take on given chips: memory, operations, collectives and time, from the compiled program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.exports import lazy

if TYPE_CHECKING:
    from swa_jax.plan.plan import plan
    from swa_jax.plan.text import describe

__all__ = ["describe", "plan"]

__getattr__ = lazy(__name__, {"plan": "plan", "describe": "text"})
