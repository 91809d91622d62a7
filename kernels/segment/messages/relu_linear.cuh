// m = max(v + e, 0), where a linear layer makes e of a few numbers of the edge.
#include "segment/messages/relu_add.cuh"
