"""Work handed to the loop is done there, once, or not at all."""

import queue
import threading

import pytest

from decode_node.quarantine import LoopBusy, LoopCall, on_loop


def test_the_loop_does_it_and_the_asker_gets_the_result() -> None:
    inbox: queue.SimpleQueue[LoopCall] = queue.SimpleQueue()
    loop = threading.Thread(target=lambda: inbox.get().run())
    loop.start()
    assert on_loop(inbox.put, threading.current_thread, timeout=10) is loop
    loop.join()


def test_an_error_reaches_the_asker_and_not_the_loop() -> None:
    def post(call: LoopCall) -> None:
        call.run()

    with pytest.raises(ZeroDivisionError):
        on_loop(post, lambda: 1 // 0, timeout=10)


def test_what_was_not_begun_in_time_is_never_done() -> None:
    calls: list[LoopCall] = []
    done: list[str] = []
    with pytest.raises(LoopBusy, match=r"0\.01 s"):
        on_loop(calls.append, lambda: done.append("late"), timeout=0.01)
    calls[0].run()
    assert done == []


def test_what_was_begun_in_time_is_waited_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go.wait(10)
        return "done"

    def post(call: LoopCall) -> None:
        threading.Thread(target=call.run).start()
        assert begun.wait(10)
        threading.Timer(0.1, go.set).start()

    assert on_loop(post, slow, timeout=0.01) == "done"
