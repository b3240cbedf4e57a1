"""Checks for chapter 05: how much of a step is computation, and how much time communication adds to it."""

from shared.checks.engine.framework import Exercise
from shared.checks.scaling import cost

communication_cost = Exercise("5.1", "communication_cost")

communication_cost.check("values", world_sizes=(1, 2))(cost.medians_are_exact)
communication_cost.check("measuring", world_sizes=(1, 2))(cost.every_measurement_starts_alike)
