"""Lets a unit own the parameters of units nested inside it.

caught by: owned_parameters · nested units
"""


def owned_parameters(module, units):
    units = list(units)
    unit_at = {path: each for path, each in module.named_modules(remove_duplicate=False) if each in units}
    if set(units) - set(unit_at.values()) or module in units:
        raise ValueError("units must be submodules of the module")
    owner = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = [path for path in unit_at if name.startswith(f"{path}.")]
        innermost = unit_at[min(around, key=len)] if around else module
        owner[parameter] = innermost if owner.get(parameter, innermost) is innermost else module
    owned = {each: [] for each in (*units, module)}
    for parameter, each in owner.items():
        owned[each].append(parameter)
    return owned
