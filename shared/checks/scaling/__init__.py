"""Checks for chapter 05: a cost model of a training step, and the measurement that tests it.

The cost model only calculates, so its checks run on one rank and compare its results with the formulas on random
cases. The measurement reads a simulated clock, so its result is exact.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.scaling import cost, cost_model

tokens_needed = Exercise("5.1", "tokens_needed")
efficiency = Exercise("5.2", "efficiency")
micro_batches_needed = Exercise("5.3", "micro_batches_needed")
communication_cost = Exercise("5.4", "communication_cost", first="measuring")

tokens_needed.check("one bucket", world_sizes=(1,))(cost_model.one_bucket_is_hidden)
tokens_needed.check("buckets", world_sizes=(1,))(cost_model.buckets_are_hidden)
efficiency.check("weak", world_sizes=(1,))(cost_model.weak_scaling_is_predicted)
efficiency.check("strong", world_sizes=(1,))(cost_model.strong_scaling_is_predicted)
micro_batches_needed.check("smallest", world_sizes=(1,))(cost_model.as_few_micro_batches_as_possible)

communication_cost.check("measuring", world_sizes=(1, 2))(cost.every_step_is_measured_alike)
communication_cost.check("values", world_sizes=(1, 2))(cost.medians_are_exact)

give_hints(
    {"ZeroDivisionError": "Hint: which divisor is 0? On 1 rank, 2(N−1) is. Which variable is N in your function?"},
    tokens_needed,
)
