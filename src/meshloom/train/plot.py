"""The loss curve of a run as a picture."""

from pathlib import Path

from meshloom.train.metrics import read

INK, TRAIN, VALID, RATE = "#222222", "#2a6fbb", "#d1495b", "#9aa5b1"


def draw(folder: Path) -> Path:
    """Writes loss.png into a run's folder: training and validation loss by step, and the learning rate. Returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train, valid = read(folder, "train"), read(folder, "valid")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    rate = axes.twinx()
    rate.plot([x["step"] for x in train], [x["lr"] for x in train], color=RATE, linewidth=1, linestyle="--")
    rate.set_ylabel("learning rate", color=RATE)
    rate.tick_params(axis="y", colors=RATE)
    rate.set_ylim(bottom=0)
    axes.plot([x["step"] for x in train], [x["loss"] for x in train], color=TRAIN, linewidth=1.6, label="training")
    if valid:
        axes.plot([x["step"] for x in valid], [x["loss"] for x in valid], color=VALID, marker="o", linewidth=1.6, label="validation")
        last = valid[-1]
        axes.annotate(
            f"{last['loss']:.3f}", (last["step"], last["loss"]), textcoords="offset points", xytext=(0, -16), ha="right", color=VALID
        )
    axes.margins(y=0.12)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token", color=INK)
    axes.set_title(folder.resolve().name, loc="left", color=INK)
    axes.grid(alpha=0.25)
    axes.set_zorder(rate.get_zorder() + 1)
    axes.patch.set_visible(False)
    for one in (axes, rate):
        one.spines["top"].set_visible(False)
    axes.legend(frameon=False)
    path = folder / "loss.png"
    temporary = path.with_suffix(".new.png")
    canvas.print_png(str(temporary))
    temporary.replace(path)
    return path
