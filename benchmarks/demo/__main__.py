"""`python -m benchmarks.demo`: three processes serve the trained model, which looks up pass keys in long texts.

The hot buffer holds a small part of the context, so the answer is right only if what each layer selects is swapped in
from host memory. Exit codes: 1 for a wrong answer, 2 if the service does not start.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import httpx
from rich.console import Console

from base.errors import StartupError
from benchmarks.demo.conversation import Answer, ask
from benchmarks.demo.cost import Cost, cost_table
from benchmarks.metric_pages import read_metrics
from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.question import KEYS, Question, make_question, sentence
from benchmarks.serving.services import wait_ready
from cli.config import ServeConfig
from cli.serve import free_port, plan, processes

TEXTS = ((1024, 0.9), (2048, 0.5), (4096, 0.1))
"""Tokens, and how deep in the text the pass key lies. A core computes about a thousand tokens a second."""
CONTEXT_LENGTH = 8192
HOT_BUFFER = 128
MODEL = "passkey"
_READY_S = 120.0
_EXCERPT_LINES = 2
_LOG_CHARS = 4000


def main() -> int:
    console = Console(highlight=False)
    # More threads would slow down a small model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-demo-") as directory:
        log_path = Path(directory) / "log"
        try:
            return run(console, log_path)
        except (StartupError, httpx.HTTPError) as error:
            if log_path.exists():
                console.print(log_path.read_text()[-_LOG_CHARS:], markup=False)
            console.print(f"[red]error:[/red] {error}")
            return 2
        except KeyboardInterrupt:
            console.print("stopped")
            return 130


def run(console: Console, log_path: Path) -> int:
    """Serve the model, ask it about one text after another, print what it says and what that cost."""
    config = ServeConfig(
        model_path=CHECKPOINT,
        served_model_name=(MODEL,),
        port=free_port(),
        chunked_prefill_size=512,
        context_length=CONTEXT_LENGTH,
        hisparse_config=json.dumps({"device_buffer_size": HOT_BUFFER, "resident_rows": False}),
    )
    children = plan(config).children()
    urls = {child.name: f"http://127.0.0.1:{child.http_port}" for child in children}
    nodes = [url for name, url in urls.items() if name != "gateway"]
    answers: list[Answer] = []
    costs: list[Cost] = []
    right = 0
    with log_path.open("wb") as log, processes(children, log=log) as running:
        console.print(f"starting {', '.join(running)}")
        wait_ready(urls["gateway"], running, _READY_S)
        for number, (length, depth) in enumerate(TEXTS, start=1):
            question = make_question(f"demo/{number}", length, depth)
            show_question(console, number, question)
            before = read_metrics(*nodes)
            answers.append(
                ask(urls["gateway"], MODEL, question, lambda text: console.print(text, end="", markup=False))
            )
            costs.append(Cost.between(before, read_metrics(*nodes)))
            is_right = question.is_answered_by(answers[-1].text)
            right += is_right
            console.print("   [green]right[/green]" if is_right else f"   [red]wrong, it is {question.key}[/red]")
        console.print("", cost_table(answers, costs, HOT_BUFFER), f"\n{right} of {len(answers)} right")
    return 0 if right == len(answers) else 1


def show_question(console: Console, number: int, question: Question) -> None:
    """The lines around the pass key, the question, and whose turn it is."""
    before, asked, after = question.text.partition(sentence(question.word, question.key))
    depth = len(before) / len(question.text)
    size = f"{len(question.text)} bytes with {KEYS} pass keys"
    console.print(f"\n[bold]{number}. A text of {size}, this one at {depth:.0%} of it:[/bold]")
    for line in _filled(before)[-_EXCERPT_LINES:]:
        console.print(f"   {line}", style="dim", markup=False)
    console.print(f"   {asked}", style="yellow")
    for line in _filled(after)[:_EXCERPT_LINES]:
        console.print(f"   {line}", style="dim", markup=False)
    console.print(f"[bold]Question:[/bold] {question.words}")
    console.print("[bold]Answer:[/bold]   ", end="")


def _filled(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
