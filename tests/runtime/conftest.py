"""A folder of small kernels for the tests of the runtime."""

import pytest

from pyg_dfgnn.runtime import compiler
from pyg_dfgnn.statements import spec as source
from pyg_dfgnn.statements.spec import Spec

SCALE = Spec("scale.cu", (("FACTOR", 3),))
REVERSE = Spec("reverse.cu", ())


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A source with two headers, one of them included twice, and one that takes dynamic shared memory."""
    texts = {
        "scale.cu": '#include "a.cuh"\n#include "b.cuh"\n\n'
        'extern "C" __global__ void __launch_bounds__(32)\nscale(float* x, long long n) {\n'
        "    const long long i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i < n) x[i] = twice(x[i]) * FACTOR;\n}\n",
        "reverse.cu": 'extern "C" __global__ void reverse(float* x, long long n) {\n'
        "    extern __shared__ float buffer[];\n"
        "    for (long long i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = x[i];\n"
        "    __syncthreads();\n"
        "    for (long long i = threadIdx.x; i < n; i += blockDim.x) x[i] = buffer[n - 1 - i];\n}\n",
        "a.cuh": "#define TWO 2\n",
        "b.cuh": '#include "a.cuh"\n__device__ float twice(float x) {\n    return TWO * x;\n}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(source, "kernels_dir", lambda: tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    source._read.cache_clear()
    source.assemble.cache_clear()
    compiler.module.cache_clear()
