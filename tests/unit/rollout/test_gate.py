from __future__ import annotations

import threading

import pytest

from lightning_rlhf.rollout.gate import SamplingGate

WAIT = 5.0


def test_needs_a_weight_version() -> None:
    with pytest.raises(RuntimeError, match="no valid weights"), SamplingGate().requests(None):
        pass


def test_version_zero_is_a_version() -> None:
    with SamplingGate().requests(0) as version:
        assert version == 0


def test_one_call_at_a_time() -> None:
    gate = SamplingGate()
    with gate.requests(1):
        assert gate.in_flight
        with pytest.raises(RuntimeError, match="one call at a time"), gate.requests(1):
            pass
    assert not gate.in_flight


def test_a_call_that_fails_leaves_the_gate_open() -> None:
    gate = SamplingGate()
    with pytest.raises(KeyError), gate.requests(1):
        raise KeyError
    with gate.requests(1):
        assert gate.goes_on()


def test_paused_engine_refuses_a_new_call() -> None:
    gate = SamplingGate()
    gate.pause()
    with pytest.raises(RuntimeError, match="resume"), gate.requests(1):
        pass
    gate.resume()
    with gate.requests(1):
        pass


def test_pause_holds_a_running_call_between_two_tokens_until_resume() -> None:
    gate, began, events = SamplingGate(), threading.Event(), []

    def sample() -> None:
        with gate.requests(1):
            with gate.step():
                began.set()
                events.append("first token")
            while "paused" not in events:
                pass
            if gate.goes_on():
                events.append("second token")

    thread = threading.Thread(target=sample)
    thread.start()
    assert began.wait(WAIT)
    gate.pause()
    events.append("paused")
    thread.join(0.05)
    assert thread.is_alive()
    events.append("resumed")
    gate.resume()
    thread.join(WAIT)
    assert events == ["first token", "paused", "resumed", "second token"]


def test_pause_returns_only_after_the_token_being_computed() -> None:
    gate, began, finish, order = SamplingGate(), threading.Event(), threading.Event(), []

    def sample() -> None:
        with gate.requests(1), gate.step():
            began.set()
            finish.wait(WAIT)
            order.append("token")

    def pause() -> None:
        gate.pause()
        order.append("paused")

    threads = [threading.Thread(target=sample), threading.Thread(target=pause)]
    threads[0].start()
    assert began.wait(WAIT)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    finish.set()
    for thread in threads:
        thread.join(WAIT)
    assert order == ["token", "paused"]


def test_abort_ends_a_paused_call_and_not_the_next_one() -> None:
    gate, ended = SamplingGate(), []
    began = threading.Event()

    def sample() -> None:
        with gate.requests(1):
            began.set()
            while gate.goes_on():
                pass
            ended.append(True)

    thread = threading.Thread(target=sample)
    thread.start()
    assert began.wait(WAIT)
    gate.pause()
    gate.abort()
    thread.join(WAIT)
    assert ended == [True]
    gate.resume()
    gate.abort()  # nothing in flight: the next call is not to be hit by it
    with gate.requests(1):
        assert gate.goes_on()


def test_asleep_until_both_parts_woke() -> None:
    gate = SamplingGate()
    gate.sleep(1)
    assert gate.asleep == ("weights", "kv_cache")
    assert gate.wake_up(["weights"]) == ("weights",)
    with pytest.raises(RuntimeError, match=r"sleeps \(kv_cache\)"), gate.requests(1):
        pass
    assert gate.wake_up(None) == ("kv_cache",)
    assert gate.wake_up(None) == ()
    with gate.requests(1):
        pass


def test_sleep_refuses_what_it_does_not_know() -> None:
    gate = SamplingGate()
    with pytest.raises(ValueError, match="level 3"):
        gate.sleep(3)
    with pytest.raises(ValueError, match="'kvcache'"):
        gate.wake_up(["kvcache"])
    with gate.requests(1), pytest.raises(RuntimeError, match="cannot sleep while it samples"):
        gate.sleep(1)
