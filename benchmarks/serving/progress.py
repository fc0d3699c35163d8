"""How far a run is, on standard error."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.serving.load import Closed
from benchmarks.serving.measure import Point


class Bar:
    """A progress bar over all requests, redrawn seldom: it runs beside what is timed. Context manager."""

    def __init__(self, requests: int) -> None:
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("", total=requests)
        self._label = ""

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def service(self, label: str) -> None:
        self._label = label
        self._progress.update(self._task, description=f"{label}: waiting until it is ready")

    def request_done(self, point: Point) -> None:
        load = f"concurrency {point.load}" if isinstance(point.load, Closed) else f"{point.load}"
        self._progress.update(self._task, description=f"{self._label}: {load}", advance=1)
