"""The grammars of a decode node's requests: compiled on threads, and written into the masks of each step.

The first request with a grammar loads the vocabulary, which takes seconds and some hundred megabytes. Most nodes never
need it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from control.messages import FinishReason
from decode_node.request import Request
from engine.grammar import CompilerBusy, GrammarError, GrammarViolation, UnsupportedTokenizer
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import Masks, MaskWriter
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import Vocabulary

log = structlog.get_logger(__name__)


class Grammars:
    """Belongs to the node's loop."""

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], max_tokens: int, pinned: bool, wake: Callable[[], None]
    ) -> None:
        """read_vocabulary: called once, by another thread; raises UnsupportedTokenizer. max_tokens: of a step. pinned:
        masks go to a CUDA device. wake: called by other threads when a grammar was compiled or refused."""
        self._read_vocabulary = read_vocabulary
        self._max_tokens = max_tokens
        self._pinned = pinned
        self._wake = wake
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grammar-start")
        self._starting: Future[GrammarCompiler] | None = None
        self._compiling: dict[str, tuple[Request, Future[GrammarCompiler] | Future[CompiledGrammar]]] = {}
        """What each request waits for: the compiler, and then its grammar."""
        self._masks: MaskWriter | None = None

    def compile(self, request: Request) -> None:
        """Begin to compile the grammar of a request. It may be computed meanwhile."""
        if self._starting is None:
            self._starting = self._starter.submit(lambda: GrammarCompiler(self._read_vocabulary()))
            self._starting.add_done_callback(lambda _: self._wake())
        self._compiling[request.request_id] = request, self._starting

    def settle(self) -> list[tuple[Request, FinishReason, str]]:
        """Start the requests whose grammars were compiled in the meantime. Returns those that cannot go on, and why.

        Finish reason: `abort` if another node, or this one later, may compile it, otherwise `invalid`.
        """
        refused: list[tuple[Request, FinishReason, str]] = []
        for request_id, (request, awaited) in list(self._compiling.items()):
            try:
                found = awaited.result() if awaited.done() else None
                if isinstance(found, GrammarCompiler):
                    assert request.generate.grammar is not None
                    awaited = found.submit(request.generate.grammar)
                    awaited.add_done_callback(lambda _: self._wake())
                    self._compiling[request_id] = request, awaited
                    found = awaited.result() if awaited.done() else None
                if found is None:
                    continue
                request.grammar = found.start(request.generate.stop_token_ids, request.generated)
            except (GrammarError, UnsupportedTokenizer) as error:
                refused.append((request, "invalid", str(error)))
            except GrammarViolation as violation:
                reason = f"its {len(request.generated)} tokens from another node do not fit its grammar: {violation}"
                refused.append((request, "error", reason))
            except CompilerBusy as error:
                refused.append((request, "abort", str(error)))
            except Exception as error:
                if awaited is self._starting and awaited.exception() is not None:
                    # It may have failed for a reason that passes.
                    self._starting = None
                log.exception("a grammar cannot be compiled", request_id=request_id)
                refused.append((request, "abort", f"its grammar cannot be compiled: {error}"))
            del self._compiling[request_id]
        return refused

    def forget(self, request: Request) -> None:
        self._compiling.pop(request.request_id, None)

    def masks(self, requests: Sequence[Request | None], width: int = 1) -> Masks:
        """Which tokens each request of a step may get, `width` of them if its drafts are right. None: the request has
        ended, and gets any."""
        states = [None if request is None else request.grammar for request in requests]
        drafts = [() if request is None else request.drafts[: width - 1] for request in requests]
        if self._masks is None:
            words = next((state.words for state in states if state is not None), None)
            if words is None:
                return Masks(None, {})
            self._masks = MaskWriter(self._max_tokens, words, self._pinned)
        return self._masks.write(states, drafts, width)

    def close(self) -> None:
        """End the threads and processes that compile."""
        self._starter.shutdown(cancel_futures=True)
        if self._starting is not None and not self._starting.cancelled() and self._starting.exception() is None:
            self._starting.result().close()
