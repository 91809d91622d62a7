"""Settings of the process, and of a block of one thread."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyg_dfgnn.settings import Settings, current, local_settings, settings

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
        with local_settings(schedule="row_split") as inside:
            assert current() is inside and current() == Settings("row_split", False, "log")
            with local_settings(fallback="silent"):
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

    with local_settings(fallback="error"):
        look()
    settings(fallback="silent")
    look()
    assert [each.fallback for each in seen] == ["log", "silent"]


def in_thread(function):
    """Return what a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_change_inside_a_block_is_for_the_process_and_not_for_the_block():
    with local_settings(schedule="row_split"):
        settings(fallback="silent")
        assert current() == Settings("row_split")
        assert in_thread(current) == Settings(fallback="silent")
    assert current() == in_thread(current) == Settings(fallback="silent")


def test_a_change_for_the_process_is_no_block():
    with pytest.raises((TypeError, AttributeError)):
        with settings(fallback="silent"):
            pass


def test_blocks_of_several_threads_leave_no_change():
    def work(schedule):
        for _ in range(300):
            with local_settings(schedule=schedule) as inside:
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
    block = local_settings(schedule="row_split")
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join()
    block.__exit__()
    assert current() == Settings()


def test_a_block_inside_itself():
    block = local_settings(schedule="row_split")
    with block:
        with local_settings(fallback="silent"), block:
            assert current() == Settings("row_split", None, "silent")
        assert current() == Settings("row_split")
    assert current() == Settings()


@pytest.mark.parametrize(
    "wrong", [{"schedule": "fastest"}, {"fallback": None}, {"deterministic": "yes"}, {"deterministic": 1}]
)
def test_wrong_value(wrong):
    (name,) = wrong
    for change in (settings, local_settings):
        with pytest.raises(ValueError, match=f"'{name}' needs one of"):
            change(**wrong)
    assert current() == Settings()


def test_unknown_name():
    with pytest.raises(ValueError, match="'settings' needs one of 'schedule', 'deterministic', 'fallback'"):
        local_settings(schedul="row_split")


def test_compiled_code_follows_a_call():
    @torch.compile(fullgraph=True, backend="eager")
    def sign(x):
        return x + 1 if current().fallback == "log" else x - 1

    assert sign(torch.zeros(1)).item() == 1
    settings(fallback="silent")
    assert sign(torch.zeros(1)).item() == -1
