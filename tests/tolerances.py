"""How far a result may be from its float64 reference: one table for all tests, relative Frobenius norm."""

import torch
from torch import Tensor

TOLERANCES = {
    # dtype, or "tf32" for float32 whose products may be rounded: (bound, reason)
    torch.float32: (5e-6, "fp32 products and sums: 5e-8 to 7e-7 expected, logits within about 100"),
    "tf32": (2e-3, "fp32 storage and sums, factors of products rounded to 10-bit mantissas: 2e-4 to 6e-4 expected"),
    torch.bfloat16: (1e-2, "bf16 storage, fp32 sums: one rounding of 2^-9 per stored value, 2e-3 to 4e-3 expected"),
    torch.float16: (2e-3, "fp16 storage, fp32 sums: one rounding of 2^-12 per stored value, 3e-4 to 4e-4 expected"),
    torch.float64: (1e-10, "reference path: only the order of sums differs, 1e-12 expected"),
}


def relative_error(got: Tensor, want: Tensor) -> float:
    """`||got - want|| / ||want||` in float64; the norm of `got` where `want` is all zero; infinite if not finite."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape, f"shape {list(got.shape)} instead of {list(want.shape)}"
    if not got.isfinite().all():
        return float("inf")
    norm = want.norm().item()
    return (got - want).norm().item() / (norm if norm > 0 else 1.0)


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype | str | None = None) -> None:
    """Compare a tensor with its reference at the bound of `dtype` (that of `got` if None)."""
    assert_all_close({name: (got, want)}, dtype)


def assert_all_close(pairs: dict[str, tuple[Tensor, Tensor]], dtype: torch.dtype | str | None = None) -> None:
    """Compare several named tensors (got, want) at once; the message names the worst and lists all."""
    errors = {name: relative_error(got, want) for name, (got, want) in pairs.items()}
    bounds = {name: TOLERANCES[dtype or got.dtype][0] for name, (got, _) in pairs.items()}
    if any(errors[name] > bounds[name] for name in errors):
        worst = max(errors, key=lambda name: errors[name] / bounds[name])
        lines = [f"  {name}: {errors[name]:.2e} (bound {bounds[name]:.0e})" for name in errors]
        raise AssertionError(f"worst is '{worst}', relative error {errors[worst]:.2e}\n" + "\n".join(lines))
