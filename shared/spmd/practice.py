"""An MLP that XLA compiles for 2 × 4 devices, for partition specs that you choose, and lists of collectives to reach.

practice.collectives_of(("dp",), (None, "tp"), ("tp",))      # ["all_reduce of 65,536 elements along tp"]
practice.table({"tensor parallelism": ((), (None, "tp"), ("tp",))})
"""

from collections.abc import Mapping

from shared import spmd
from shared.tables import Table

Spec = tuple  # what P(…) gets: one axis, tuple of axes or None per dimension
SHAPES = {"x": (512, 256), "A": (256, 1024), "B": (1024, 256)}  # the program is relu(x @ A) @ B

# The name of each target: the collectives that the compiled program should have, in this order.
WANTED: dict[str, list[str]] = {
    "1": ["all_reduce of 65,536 elements along tp"],
    "2": ["all_gather of 262,144 elements along tp"],
    "3": ["all_gather of 65,536 elements along dp", "all_reduce of 65,536 elements along tp"],
    "4": ["all_gather of 65,536 elements along dp"] * 2 + ["all_reduce of 65,536 elements along tp"],
}


def collectives_of(x: Spec, a: Spec, b: Spec) -> list[str]:
    """Compile the program for arrays with these specs on a mesh of dp = 2 and tp = 4. Returns its collectives."""
    spmd.virtual_devices(8)
    import jax  # It takes a second, and most of the course does without it.
    from jax import numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in zip(SHAPES.values(), (x, a, b), strict=True)
    ]
    compiled = jax.jit(lambda x, a, b: jax.nn.relu(x @ a) @ b).lower(*arrays).compile()
    return [str(each) for each in spmd.of_program(compiled, mesh)]


def table(specs: Mapping[str, tuple[Spec, Spec, Spec] | None]) -> Table:
    """Show, for each target, the collectives that it wants and those that your specs gave."""
    rows = []
    for name, wanted in WANTED.items():
        given = specs.get(name)
        found = collectives_of(*given) if given else None
        verdict = "" if found is None else "yes" if found == wanted else "no"
        got = "" if found is None else ", ".join(found) or "none"
        rows.append([name, ", ".join(wanted), got, verdict])
    return Table(["target", "wanted", "with your specs", "reached"], rows)
