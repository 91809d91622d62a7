// A matrix of each layer.
template <class T>
struct Layers {
    T* first[MAX_LAYERS];
    __device__ __forceinline__ T* operator[](int layer) const {
        T* matrix = first[0];
#pragma unroll
        for (int i = 1; i < LAYERS; ++i) matrix = layer == i ? first[i] : matrix;
        return matrix;
    }
};
