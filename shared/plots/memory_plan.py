"""Figures of planned memory: the bytes that a rank would hold, and the GPUs on which they fit. Pure functions."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.plots import COLORS, HATCHES, LINES, MARKERS

GPUS_GB = (24, 80, 141)  # a desktop GPU; A100 or H100; H200
COMPONENT_STYLES = {  # the color and hatch of each component; the memory figures use the same for components in both
    "parameters": (COLORS[0], HATCHES[0]),
    "gradients": (COLORS[1], HATCHES[1]),
    "optimizer": (COLORS[2], HATCHES[2]),
    "gathered": (COLORS[4], HATCHES[4]),
    "activations": (COLORS[5], HATCHES[5]),
}


def stages(plans: dict[str, dict[str, float]], title: str = "", gpus_gb: tuple[float, ...] = GPUS_GB) -> Figure:
    """Draw the planned bytes of one rank, one bar per strategy with its components stacked, and the memory of GPUs.

    A bar that is more than a third longer than the largest GPU's memory is cut off there. Its total is printed beside
    it in either case.

    Args:
        plans: The bytes by component, as returned by `planner.Plan.by_component`, by strategy.

    Raises:
        ValueError: If there is no bar.
    """
    if not plans:
        raise ValueError("There is nothing to draw: give at least one strategy with its bytes by component.")
    figure, axes = plt.subplots(figsize=(8.0, 1.3 + 0.42 * len(plans)), layout="constrained")
    edge_gb = 1.33 * max(gpus_gb)
    right_gb = 1.05 * max(gpus_gb)
    for y, parts in enumerate(plans.values()):
        left_gb = 0.0
        for name, held_bytes in parts.items():
            color, hatch = COMPONENT_STYLES[name]
            width_gb = max(0.0, min(held_bytes / 1e9, edge_gb - left_gb))
            style = {"facecolor": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
            axes.barh(y, width_gb, left=left_gb, height=0.65, label=name, **style)
            left_gb += width_gb
        total_gb = sum(parts.values()) / 1e9
        cut = "… " if total_gb > edge_gb else ""
        fits = "" if any(total_gb <= gpu_gb for gpu_gb in gpus_gb) else ", fits no GPU"
        # The lines that the label would otherwise cross.
        crossed = [gpu_gb for gpu_gb in gpus_gb if 0 <= gpu_gb - left_gb < 0.11 * edge_gb]
        label, label_gb = f"{cut}{_rounded(total_gb)}{fits}", max([left_gb, *crossed]) + 0.01 * edge_gb
        axes.text(label_gb, y, label, va="center")
        right_gb = max(right_gb, label_gb + 0.014 * edge_gb * len(label))
    for gpu_gb, line in zip(gpus_gb, LINES[1:], strict=False):
        axes.axvline(gpu_gb, color="black", linestyle=line, linewidth=1.3)
        axes.text(gpu_gb, 1.0, f"{gpu_gb} GB", transform=axes.get_xaxis_transform(), ha="center", va="bottom", size=9)
    axes.set(xlabel="GB per rank", yticks=range(len(plans)), xlim=(0, right_gb), ylim=(len(plans) - 0.5, -0.5))
    axes.set_yticklabels(list(plans))
    axes.set_title(title, pad=18)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    drawn = {name: handle for handle, name in zip(handles, names, strict=True) if any(p[name] for p in plans.values())}
    figure.legend(drawn.values(), drawn.keys(), frameon=False, ncols=len(drawn), loc="outside lower center")
    plt.close(figure)
    return figure


def activation_growth(
    predicted_bytes: dict[str, dict[int, float]], measured_bytes: dict[str, dict[int, float]]
) -> Figure:
    """Draw the bytes a layer keeps per token against the sequence length: formulas as lines, measurements as marks.

    Args:
        predicted_bytes: The bytes per token for each sequence length, by name. A name has the same color in both
            arguments.
        measured_bytes: The same for measurements.
    """
    figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    for index, name in enumerate(dict.fromkeys([*predicted_bytes, *measured_bytes])):
        color = COLORS[index]
        line, marks = predicted_bytes.get(name, {}), measured_bytes.get(name, {})
        if line:
            label = f"{name}, formula"
            kilobytes = [value / 1e3 for value in line.values()]
            axes.plot(list(line), kilobytes, color=color, linestyle=LINES[index], label=label)
        if marks:
            kilobytes = [value / 1e3 for value in marks.values()]
            axes.plot(list(marks), kilobytes, MARKERS[index], color=color, label=f"{name}, measured")
    axes.set(xlabel="sequence length, tokens", ylabel="KB kept per token", xlim=(0, None), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plt.close(figure)
    return figure


def _rounded(gigabytes: float) -> str:
    return f"{gigabytes:.1f} GB" if gigabytes < 100 else f"{gigabytes:,.0f} GB"
