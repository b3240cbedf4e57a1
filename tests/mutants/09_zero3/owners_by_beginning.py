"""Compares name prefixes without the dot, so blocks.1 also owns the parameters of blocks.10.

caught by: owned_parameters · owners
"""


def owned_parameters(module, units):
    units = list(units)
    unit_at = {path: each for path, each in module.named_modules(remove_duplicate=False) if each in units}
    if set(units) - set(unit_at.values()) or module in units:
        raise ValueError("units must be submodules of the module")
    owner = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = [path for path in unit_at if name.startswith(path)]
        innermost = unit_at[max(around, key=len)] if around else module
        owner[parameter] = innermost if owner.get(parameter, innermost) is innermost else module
    owned = {each: [] for each in (*units, module)}
    for parameter, each in owner.items():
        owned[each].append(parameter)
    return owned
