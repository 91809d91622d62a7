"""Graph attention: the fused operators beside PyG's, unfused, compiled and FlexAttention forms."""

from pyg_dfgnn.bench.case import Family
from pyg_dfgnn.bench.cases.attention.baselines import IMPLEMENTATIONS
from pyg_dfgnn.bench.cases.attention.case import KERNEL_PASSES, SCORES, AttentionCase, check_groups
from pyg_dfgnn.bench.cases.attention.peers import peers
from pyg_dfgnn.statements.op import DIRECTIONS

ATTENTION = Family(SCORES, DIRECTIONS, KERNEL_PASSES, AttentionCase.of, IMPLEMENTATIONS, check_groups, peers)
