"""Graph attention: the fused operators beside PyG's, unfused, compiled and FlexAttention forms."""

from benchmarks.case import Family
from benchmarks.cases.attention.baselines import IMPLEMENTATIONS
from benchmarks.cases.attention.case import KERNEL_PASSES, SCORES, AttentionCase, check_groups
from benchmarks.cases.attention.peers import peers
from pyg_dfgnn.statements.op import DIRECTIONS

ATTENTION = Family(SCORES, DIRECTIONS, KERNEL_PASSES, AttentionCase.of, IMPLEMENTATIONS, check_groups, peers)
