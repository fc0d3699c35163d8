"""matplotlib, without a display, where the extra that brings it is installed."""

import importlib.util
from typing import TYPE_CHECKING, Any

from base.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_installed() -> None:
    """Raises StartupError, before anything was measured, if no figure could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("matplotlib is not installed, which draws the figure; install hisparse-pd[bench]")


def new_figure(**options: Any) -> "Figure":
    """A figure of its own, which needs no display and no global state. The options are matplotlib's."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**options)
    FigureCanvasAgg(figure)
    return figure
