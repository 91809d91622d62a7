"""Settings: for the process when called, for a block and a thread in `with`."""

import threading

import pytest
import torch

from pyg_dfgnn.settings import Settings, current, settings


def test_defaults():
    assert current() == Settings(schedule="auto", deterministic=None, fallback="log")


def test_call_changes_what_it_names():
    settings(fallback="error")
    settings(deterministic=True)
    assert current() == Settings(deterministic=True, fallback="error")


def test_with_restores_also_after_an_error():
    settings(deterministic=False)
    with pytest.raises(RuntimeError):
        with settings(schedule="rows") as inside:
            assert current() is inside and current() == Settings("rows", False, "log")
            with settings(fallback="silent"):
                assert current() == Settings("rows", False, "silent")
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


@pytest.mark.parametrize("wrong", [{"schedule": "fastest"}, {"fallback": None}, {"deterministic": "yes"}])
def test_wrong_value(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"'{name}' needs one of"):
        settings(**wrong)
    assert current() == Settings()


def test_unknown_name():
    with pytest.raises(ValueError, match="'settings' needs one of 'schedule', 'deterministic', 'fallback'"):
        settings(schedul="rows")


def test_compiled_code_follows_a_call():
    @torch.compile(fullgraph=True, backend="eager")
    def sign(x):
        return x + 1 if current().fallback == "log" else x - 1

    assert sign(torch.zeros(1)).item() == 1
    settings(fallback="silent")
    assert sign(torch.zeros(1)).item() == -1
