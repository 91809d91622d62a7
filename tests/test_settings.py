"""Settings: for the process when called, for a block and a thread in `with`."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_dfgnn.settings import Settings, current, settings

SETTINGS = Settings()


def test_defaults():
    assert current() == Settings(schedule="auto", deterministic=None, fallback="log")


def test_call_changes_what_it_names():
    settings(fallback="error")
    settings(deterministic=True)
    assert current() == Settings(deterministic=True, fallback="error")


def test_with_restores_also_after_an_error():
    settings(deterministic=False)
    with pytest.raises(RuntimeError):
        with settings(schedule="row_split") as inside:
            assert current() is inside and current() == Settings("row_split", False, "log")
            with settings(fallback="silent"):
                assert current() == Settings("row_split", False, "silent")
            assert current() is inside
            raise RuntimeError
    assert current() == Settings(deterministic=False)


def test_with_is_for_one_thread_and_call_is_for_all():
    seen = []

    def look():
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()

    with settings(fallback="error"):
        look()
    settings(fallback="silent")
    look()
    assert [each.fallback for each in seen] == ["log", "silent"]


def in_thread(function):
    """Return what a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("end", ["death", "block"])
def test_an_object_that_is_kept_is_for_its_thread(end):
    settings(deterministic=True)
    kept = settings(fallback="error")
    assert current() == Settings(deterministic=True, fallback="error")
    assert in_thread(current) == Settings(deterministic=True)
    in_thread(lambda: settings(schedule="pmf") and None)
    assert current() == Settings("pmf", True, "error")
    assert in_thread(current) == Settings("pmf", True)
    if end == "block":
        with kept:
            assert current() == Settings("pmf", True, "error")
            assert in_thread(current) == Settings("pmf", True)
    del kept
    expected = Settings("pmf", True, "error" if end == "death" else "log")
    assert current() == in_thread(current) == expected
    in_thread(lambda: settings(schedule="auto") and None)
    assert current().schedule == "auto"


def test_another_thread_may_enter_or_end_what_one_has_made():
    kept = [settings(fallback="error"), settings(schedule="pmf")]

    def work():
        with kept[0]:
            inside = current()
        kept.clear()
        return inside, current()

    assert in_thread(work) == (Settings(fallback="error"), Settings("pmf"))
    assert current() == Settings("pmf")


def test_a_change_inside_a_block_is_for_the_process_and_not_for_the_block():
    with settings(schedule="row_split"):
        settings(fallback="silent")
        kept = settings(deterministic=True)
        assert current() == Settings("row_split")
        assert in_thread(current) == Settings(fallback="silent")
    assert current() == Settings("auto", True, "silent")
    assert in_thread(current) == Settings(fallback="silent")
    del kept


def test_an_object_that_the_garbage_collector_finds_while_settings_change():
    module = sys.modules["pyg_dfgnn.settings"]
    kept = settings(fallback="error")
    with module._changing():
        # As a collection would here: a callback that waited for the lock would wait forever.
        del kept
    assert in_thread(current) == current() == Settings(fallback="error")


def test_blocks_of_several_threads_leave_no_change():
    def work(schedule):
        for _ in range(300):
            with settings(schedule=schedule) as inside:
                assert current() is inside and inside.schedule == schedule

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, ("row_split", "block_mma", "pmf")))
    finally:
        sys.setswitchinterval(before)
    assert current() == Settings()


def test_a_block_may_end_in_another_thread():
    block = settings(schedule="row_split")
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join()
    block.__exit__()
    assert current() == Settings()


@pytest.mark.parametrize("first", [0, 1])
def test_settings_that_are_made_before_their_blocks(first):
    made = [settings(schedule="row_split"), settings(schedule="pmf", fallback="error")]
    with made[first], made[1 - first]:
        assert current() == Settings("row_split" if first else "pmf", None, "error")
    assert current() == Settings()


def test_a_block_inside_itself():
    kept = settings(schedule="row_split")
    with kept:
        with settings(fallback="silent"), kept:
            assert current() == Settings("row_split", None, "silent")
        assert current() == Settings("row_split")
    assert current() == Settings()


def test_calls_stay_when_a_block_made_before_them_is_entered():
    block = settings(schedule="row_split")
    settings(schedule="pmf")
    settings(fallback="silent")
    with block:
        assert current() == Settings("row_split", None, "silent")
    assert current() == Settings("pmf", None, "silent")
    module = sys.modules["pyg_dfgnn.settings"]
    for _ in range(100):
        settings(schedule="block_mma")
    assert len(module._calls) <= 1


@pytest.mark.parametrize(
    "wrong", [{"schedule": "fastest"}, {"fallback": None}, {"deterministic": "yes"}, {"deterministic": 1}]
)
def test_wrong_value(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"'{name}' needs one of"):
        settings(**wrong)
    assert current() == Settings()


def test_unknown_name():
    with pytest.raises(ValueError, match="'settings' needs one of 'schedule', 'deterministic', 'fallback'"):
        settings(schedul="row_split")


def test_compiled_code_follows_a_call():
    @torch.compile(fullgraph=True, backend="eager")
    def sign(x):
        return x + 1 if current().fallback == "log" else x - 1

    assert sign(torch.zeros(1)).item() == 1
    settings(fallback="silent")
    assert sign(torch.zeros(1)).item() == -1
