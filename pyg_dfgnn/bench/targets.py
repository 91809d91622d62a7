"""Times to reach on one H200, in milliseconds, by (score, heads, channels, dtype, direction) and graph.

``first`` is what the first release has to reach, ``must`` the best prototype measured, ``aim`` the schedule's roof.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    must: float
    aim: float
    first: float | None = None


Key = tuple[str, int, int, str, str]


def _row(
    graphs: str, must: tuple[float, ...], aim: tuple[float, ...], first: tuple[float, ...] = ()
) -> dict[str, Target]:
    firsts: tuple[float | None, ...] = first or (None,) * len(must)
    return {g: Target(m, a, f) for g, m, a, f in zip(graphs, must, aim, firsts, strict=True)}


TARGETS: dict[Key, dict[str, Target]] = {
    ("dot", 1, 128, "float32", "fwd"): _row(
        "acde", (0.40, 19, 11.3, 0.072), (0.15, 17, 9.5, 0.048), (0.45, 20.5, 12.3, 0.08)
    ),
    ("dot", 1, 128, "float32", "fwd+bwd"): _row(
        "acde", (1.55, 55, 31.5, 0.27), (0.50, 52, 28.5, 0.16), (1.7, 58, 33, 0.29)
    ),
    ("dot", 1, 128, "bfloat16", "fwd"): _row("acde", (0.25, 9.0, 5.9, 0.055), (0.10, 7.2, 4.8, 0.035)),
    ("dot", 1, 128, "bfloat16", "fwd+bwd"): _row("acde", (1.40, 31, 19.5, 0.22), (0.35, 24, 15.5, 0.12)),
    ("dot", 8, 16, "float32", "fwd"): _row("acde", (0.40, 20.5, 11.6, 0.075), (0.15, 17.5, 9.6, 0.05)),
    ("dot", 8, 16, "float32", "fwd+bwd"): _row("acde", (1.4, 57, 32, 0.27), (0.50, 53, 28.5, 0.16)),
    ("cosine", 1, 128, "float32", "fwd"): _row("acde", (0.36, 8.5, 4.9, 0.065), (0.12, 7.7, 4.6, 0.036)),
    ("cosine", 1, 128, "float32", "fwd+bwd"): _row("acde", (1.4, 42, 24, 0.25), (0.45, 35, 19, 0.13)),
    ("add", 1, 128, "float32", "fwd"): _row("acde", (0.26, 8.5, 4.55, 0.045), (0.11, 7.8, 4.4, 0.028)),
    ("add", 1, 128, "float32", "fwd+bwd"): _row("acde", (0.90, 27, 15, 0.15), (0.35, 18.5, 10, 0.08)),
    ("add", 8, 16, "float32", "fwd"): _row("acde", (0.30, 9.2, 4.65, 0.047), (0.12, 8.3, 4.5, 0.03)),
    ("add", 8, 16, "float32", "fwd+bwd"): _row("acde", (1.0, 28, 15.5, 0.16), (0.40, 19, 10.5, 0.085)),
    ("gatv2", 1, 128, "float32", "fwd"): _row("acd", (0.30, 10.0, 5.5), (0.15, 8.6, 4.6)),
    ("gatv2", 1, 128, "float32", "fwd+bwd"): _row("acd", (1.2, 40, 22), (0.5, 28, 15)),
}

PEAK_MB: dict[tuple[Key, str], float] = {(("dot", 1, 128, "float32", "fwd+bwd"), "c"): 1200.0}
"""Device memory above the inputs and the cached graph."""


def verdict(value: float, target: float | None) -> str:
    """'reached', or by which factor ``value`` misses ``target``; '' without a target."""
    if target is None:
        return ""
    return "reached" if value <= target else f"missed by {value / target:.2f}x"
