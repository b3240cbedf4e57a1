"""Checks for chapter 05: a cost model of a training step, and the measurement that tests it.

The cost model only calculates, so its checks run on one rank and compare its results with the formulas on random
cases. The measurement reads a simulated clock, so its result is exact.
"""

from shared.checks.engine.framework import Exercise
from shared.checks.engine.hints import give_hints
from shared.checks.scaling import cost, cost_model

fit_alpha_beta = Exercise("5.1", "fit_alpha_beta")
predict_step_s = Exercise("5.2", "predict_step_s")
buckets_of = Exercise("5.3, part 1", "buckets_of")
best_cap_bytes = Exercise("5.3, part 2", "best_cap_bytes")
efficiency = Exercise("5.4", "efficiency")
communication_cost = Exercise("5.5", "communication_cost", first="measuring")

fit_alpha_beta.check("values", world_sizes=(1,))(cost_model.the_line_is_found)
fit_alpha_beta.check("noise", world_sizes=(1,))(cost_model.noisy_times_are_fitted)
predict_step_s.check("values", world_sizes=(1,))(cost_model.steps_are_predicted)
buckets_of.check("buckets", world_sizes=(1,))(cost_model.buckets_are_filled_in_order)
best_cap_bytes.check("best", world_sizes=(1,))(cost_model.the_best_cap_is_found)
efficiency.check("weak", world_sizes=(1,))(cost_model.weak_scaling_is_predicted)
efficiency.check("strong", world_sizes=(1,))(cost_model.strong_scaling_is_predicted)

communication_cost.check("measuring", world_sizes=(1, 2))(cost.every_step_is_measured_alike)
communication_cost.check("values", world_sizes=(1, 2))(cost.medians_are_exact)

give_hints(
    {"ZeroDivisionError": "Hint: which divisor is 0? On 1 rank, 2(N−1) is. Which variable is N in your function?"},
    fit_alpha_beta,
)
