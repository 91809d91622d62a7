// What a row gathers of its edges: sums, maxima, and the two numbers of a softmax in one pass. T is Fragment, with a
// number for each channel, or HeadValues.

template <class Work>
__device__ __forceinline__ void for_each_number(Fragment& x, const Work& work) {
    EACH_CHANNEL work(x.x[h][c], h, c);
}
template <class Work>
__device__ __forceinline__ void for_each_number(HeadValues& x, const Work& work) {
    EACH_HEAD work(x.x[h], h, 0);
}
__device__ __forceinline__ float number_at(const Fragment& x, int h, int c) { return x.x[h][c]; }
__device__ __forceinline__ float number_at(const HeadValues& x, int h, int) { return x.x[h]; }

template <class T>
__device__ __forceinline__ T filled(float number) {
    T x;
    for_each_number(x, [&](float& y, int, int) { y = number; });
    return x;
}

// Where the states of a kernel lie: [fragments, count, HEADS, CHANNELS], then [head values, count, HEADS].
struct States {
    float* buffer;
    i64 count, row;
    int fragments;

    __device__ __forceinline__ Fragment load(int plane, const Fragment&, const Lanes& l) const {
        return load_fragment_fp32(buffer, plane * count + row, l);
    }
    __device__ __forceinline__ HeadValues load(int plane, const HeadValues&, const Lanes& l) const {
        return load_state_heads(buffer + fragments * count * ROW_STRIDE, plane * count + row, l);
    }
    __device__ __forceinline__ void store(int plane, const Fragment& x, const Lanes& l) const {
        store_fragment_fp32(buffer, plane * count + row, l, x);
    }
    __device__ __forceinline__ void store(int plane, const HeadValues& x, const Lanes& l) const {
        store_heads(buffer + fragments * count * ROW_STRIDE, plane * count + row, l, x);
    }
};

template <class T>
struct Sum {
    T value;

    __device__ __forceinline__ void clear() { value = filled<T>(0.0f); }
    __device__ __forceinline__ void lose() { clear(); }
    __device__ __forceinline__ void add(const T& term) {
        for_each_number(value, [&](float& x, int h, int c) { x += number_at(term, h, c); });
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Sum& lost, const Sum& other) {
        accumulate<COMPENSATED>(value, lost.value, other.value);
    }
    __device__ __forceinline__ void finish(const Sum& lost) { add_lost(value, lost.value); }
    __device__ __forceinline__ void exchange(int mask) {
        for_each_number(value, [&](float& x, int, int) { x += __shfl_xor_sync(FULL_MASK, x, mask); });
    }
    __device__ __forceinline__ void save(const States& s, int plane, const Lanes& l) const { s.store(plane, value, l); }
    __device__ __forceinline__ void restore(const States& s, int plane, const Lanes& l) {
        value = s.load(plane, value, l);
    }
    __device__ __forceinline__ T total() const { return value; }
};

// A row without edges has the maximum 0.
__device__ __forceinline__ float maximum_of(float x, bool is_empty) { return is_empty ? 0.0f : x; }

template <class T>
struct Maximum {
    T value;

    __device__ __forceinline__ void clear() { value = filled<T>(negative_infinity()); }
    __device__ __forceinline__ void lose() {}
    __device__ __forceinline__ void add(const T& term) {
        for_each_number(value, [&](float& x, int h, int c) { x = max_or_nan(x, number_at(term, h, c)); });
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Maximum&, const Maximum& other) {
        add(other.value);
    }
    __device__ __forceinline__ void finish(const Maximum&) {}
    __device__ __forceinline__ void exchange(int mask) {
        for_each_number(value, [&](float& x, int, int) { x = max_or_nan(x, __shfl_xor_sync(FULL_MASK, x, mask)); });
    }
    __device__ __forceinline__ void save(const States& s, int plane, const Lanes& l) const { s.store(plane, value, l); }
    __device__ __forceinline__ void restore(const States& s, int plane, const Lanes& l) {
        value = s.load(plane, value, l);
    }
    __device__ __forceinline__ T most(bool is_empty) const {
        T x = value;
        for_each_number(x, [&](float& y, int, int) { y = maximum_of(y, is_empty); });
        return x;
    }
};

// The maximum m of x and the sum of exp(x - m).
template <class T>
struct Softmax {
    Maximum<T> maximum;
    Sum<T> sum;

    __device__ __forceinline__ void clear() {
        maximum.clear();
        sum.clear();
    }
    __device__ __forceinline__ void lose() { sum.lose(); }
    __device__ __forceinline__ void add(const T& term) {
        for_each_number(maximum.value, [&](float& m, int h, int c) {
            const float x = number_at(term, h, c);
            float& s = sum_at(h, c);
            // exp(-inf) is 0 whatever the maximum, x - x makes a NaN of infinity as exp(x - m) of the maximum does.
            const float e = x == negative_infinity() ? 0.0f : expf(-fabsf(x - m));
            s = x > m ? s * e + (1.0f + (x - x)) : s + e;
            m = max_or_nan(m, x);
        });
    }
    // Scales the sum to a maximum at least as large.
    __device__ __forceinline__ void scale_to(const T& most, Sum<T>& lost) {
        for_each_number(maximum.value, [&](float& m, int h, int c) {
            const float to = number_at(most, h, c);
            const float scale = m == to || m == negative_infinity() ? (m == to ? 1.0f : 0.0f) : expf(m - to);
            sum_at(h, c) *= scale;
            number_of(lost.value, h, c) *= scale;
            m = to;
        });
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Softmax& lost, const Softmax& other) {
        Softmax term = other;
        Sum<T> none;
        none.clear();
        Maximum<T> most = maximum;
        most.add(other.maximum.value);
        scale_to(most.value, lost.sum);
        term.scale_to(most.value, none);
        sum.template take<COMPENSATED>(lost.sum, term.sum);
    }
    __device__ __forceinline__ void finish(const Softmax& lost) { sum.finish(lost.sum); }
    __device__ __forceinline__ void exchange(int mask) {
        Softmax other = *this, lost;
        lost.lose();
        for_each_number(other.maximum.value, [&](float& x, int, int) { x = __shfl_xor_sync(FULL_MASK, x, mask); });
        for_each_number(other.sum.value, [&](float& x, int, int) { x = __shfl_xor_sync(FULL_MASK, x, mask); });
        take<false>(lost, other);
    }
    __device__ __forceinline__ void save(const States& s, int plane, const Lanes& l) const {
        maximum.save(s, plane, l);
        sum.save(s, plane + 1, l);
    }
    __device__ __forceinline__ void restore(const States& s, int plane, const Lanes& l) {
        maximum.restore(s, plane, l);
        sum.restore(s, plane + 1, l);
    }
    __device__ __forceinline__ T total() const { return sum.value; }
    __device__ __forceinline__ T most(bool is_empty) const { return maximum.most(is_empty); }

    static __device__ __forceinline__ float& number_of(Fragment& x, int h, int c) { return x.x[h][c]; }
    static __device__ __forceinline__ float& number_of(HeadValues& x, int h, int) { return x.x[h]; }
    __device__ __forceinline__ float& sum_at(int h, int c) { return number_of(sum.value, h, c); }
};
