"""`python -m pyg_dfgnn`: what it tells of an installation, and what it does where something lacks."""

import subprocess
import sys

import pytest
import torch

from pyg_dfgnn import __main__ as command
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device


def test_info_names_versions_and_says_what_is_not_there(capsys):
    assert command.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown and "kernels on disk: " in shown
    assert torch.cuda.is_available() or "PyTorch finds no GPU" in shown


def test_commands_are_listed_by_the_module():
    done = subprocess.run([sys.executable, "-m", "pyg_dfgnn", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("info", "doctor", "clear-cache"))


@needs_compiler
@pytest.mark.parametrize("name", command.LAYERS)
def test_layers_of_the_doctor_run_kernels(name):
    with emulated_device() as launched:
        assert command._error(command.LAYERS[name], torch.device("cpu")) < 1e-4
    assert launched


def test_doctor_says_what_it_cannot_tell_and_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert command.doctor() == 0 and "cannot be told" in capsys.readouterr().out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.doctor() == 1 and "finds no GPU" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.doctor() == 1 and ".[cuda13]" in capsys.readouterr().out


def test_doctor_reports_a_family_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index else (7, 5))
    errors = dict(zip(command.LAYERS.values(), (1e-7, 0.5, 1e-6, 1e-6)))
    monkeypatch.setattr(command, "_error", lambda make, device: errors[make])
    assert command.doctor() == 1
    shown = capsys.readouterr().out
    assert "GPU 0 has compute capability 7.5" in shown and "FAILED: aggregation on GPU 1" in shown
    assert "ok: attention on GPU 1" in shown


def test_cache_is_cleared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    assert command.main(["clear-cache"]) == 0
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernel.cubin").write_bytes(b"12345")
    assert command.main(["clear-cache"]) == 0 and "1 files, 5 bytes" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
