"""Graph attention: the fused operators beside PyG's, unfused, compiled and FlexAttention forms."""

from benchmarks.case import Family
from benchmarks.cases.attention.baselines import IMPLEMENTATIONS
from benchmarks.cases.attention.case import SCORES, AttentionCase, check_groups

ATTENTION = Family(SCORES, AttentionCase.of, IMPLEMENTATIONS, check_groups)
