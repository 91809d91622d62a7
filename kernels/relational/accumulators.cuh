// What a row gathers of its edges: sums, maxima, and the two numbers of a softmax in one pass. T is Fragment, with a
// number for each channel, or HeadValues.

// A state in a buffer of `count` of them, [fragments, count, HEADS, CHANNELS], then [head values, count, HEADS]; read
// or written one after the other.
struct StateAt {
    float* buffer;
    i64 count, row;
    int fragment, head_value;

    __device__ __forceinline__ StateAt(const float* buffer, i64 count, i64 row)
        : buffer(const_cast<float*>(buffer)), count(count), row(row), fragment(0), head_value(0) {}

    __device__ __forceinline__ float* heads() const { return buffer + STATE_FRAGMENTS * count * ROW_STRIDE; }
    __device__ __forceinline__ void load(Fragment& x, const Lanes& l) {
        x = load_fragment_fp32(buffer, fragment++ * count + row, l);
    }
    __device__ __forceinline__ void load(HeadValues& x, const Lanes& l) {
        x = load_state_heads(heads(), head_value++ * count + row, l);
    }
    __device__ __forceinline__ void store(const Fragment& x, const Lanes& l) {
        store_fragment_fp32(buffer, fragment++ * count + row, l, x);
    }
    __device__ __forceinline__ void store(const HeadValues& x, const Lanes& l) {
        store_heads(heads(), head_value++ * count + row, l, x);
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
    template <class Scale>
    __device__ __forceinline__ void multiply(const Scale& scale) {
        for_each_number(value, [&](float& x, int h, int c) { x *= number_at(scale, h, c); });
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Sum& lost, const Sum& other) {
        accumulate<COMPENSATED>(value, lost.value, other.value);
    }
    __device__ __forceinline__ void finish(const Sum& lost) { add_lost(value, lost.value); }
    __device__ __forceinline__ void exchange(int mask) {
        for_each_number(value, [&](float& x, int, int) { x += __shfl_xor_sync(FULL_MASK, x, mask); });
    }
    __device__ __forceinline__ void save(StateAt& at, const Lanes& l) const { at.store(value, l); }
    __device__ __forceinline__ void restore(StateAt& at, const Lanes& l) { at.load(value, l); }
    __device__ __forceinline__ T total() const { return value; }
};

// The sum of the outer products of a short row S and a wide one, a sum for each number of the short row.
template <class S, class T>
struct Outer {
    static constexpr int K = sizeof(S) / sizeof(float);
    Sum<T> rows[K];

    __device__ __forceinline__ void clear() { EACH_SHORT(K) rows[k].clear(); }
    __device__ __forceinline__ void lose() {}
    __device__ __forceinline__ void add(const S& x, const T& term) {
        EACH_SHORT(K) {
            for_each_number(rows[k].value, [&](float& sum, int h, int c) { sum = fmaf(x.x[k], number_at(term, h, c), sum); });
        }
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Outer&, const Outer& other) {
        EACH_SHORT(K) rows[k].add(other.rows[k].value);
    }
    __device__ __forceinline__ void finish(const Outer&) {}
    __device__ __forceinline__ void exchange(int mask) { EACH_SHORT(K) rows[k].exchange(mask); }
    __device__ __forceinline__ void save(StateAt& at, const Lanes& l) const { EACH_SHORT(K) rows[k].save(at, l); }
    __device__ __forceinline__ void restore(StateAt& at, const Lanes& l) { EACH_SHORT(K) rows[k].restore(at, l); }
    // Writes sum k of a piece to row K piece + k.
    template <int FORM>
    __device__ __forceinline__ void write(float* base, int piece, const Lanes& l) const {
        EACH_SHORT(K) write_row<true, FORM>(base, piece * K + k, l, rows[k].value);
    }
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
    __device__ __forceinline__ void save(StateAt& at, const Lanes& l) const { at.store(value, l); }
    __device__ __forceinline__ void restore(StateAt& at, const Lanes& l) { at.load(value, l); }
    __device__ __forceinline__ T most(bool is_empty) const {
        T x = value;
        for_each_number(x, [&](float& y, int, int) { y = maximum_of(y, is_empty); });
        return x;
    }
};

__device__ __forceinline__ float& number_in(Fragment& x, int h, int c) { return x.x[h][c]; }
__device__ __forceinline__ float& number_in(HeadValues& x, int h, int) { return x.x[h]; }

// The maximum m of x and the sum of exp(x - m).
template <class T>
struct Softmax {
    Maximum<T> maximum;
    Sum<T> sum;

    // What the sums so far are multiplied with, and what the new term has.
    struct Weights {
        T scale, term;
    };

    __device__ __forceinline__ void clear() {
        maximum.clear();
        sum.clear();
    }
    __device__ __forceinline__ void lose() { sum.lose(); }
    __device__ __forceinline__ Weights add(const T& term) {
        Weights w;
        for_each_number(maximum.value, [&](float& m, int h, int c) {
            const float x = number_at(term, h, c);
            float &s = number_in(sum.value, h, c), &scale = number_in(w.scale, h, c), &e = number_in(w.term, h, c);
            // exp(-inf) is 0 whatever the maximum; x - x makes a NaN of infinity as exp(x - m) of the maximum does.
            const float apart = x == negative_infinity() ? 0.0f : expf(-fabsf(difference(x, m)));
            scale = x > m ? apart : 1.0f;
            e = x > m ? 1.0f + (x - x) : apart;
            s = s * scale + e;
            m = max_or_nan(m, x);
        });
        return w;
    }
    // Takes another maximum, at least as large; returns what sums are multiplied with.
    __device__ __forceinline__ T scale_to(const T& most) {
        T scale;
        for_each_number(maximum.value, [&](float& m, int h, int c) {
            const float to = number_at(most, h, c);
            number_in(scale, h, c) = m == to ? 1.0f : m == negative_infinity() ? 0.0f : expf(m - to);
            m = to;
        });
        sum.multiply(scale);
        return scale;
    }
    // As `take`; returns what the sums of this and of the other are multiplied with.
    template <bool COMPENSATED>
    __device__ __forceinline__ Weights join(Softmax& lost, const Softmax& other) {
        Softmax term = other;
        Maximum<T> most = maximum;
        most.add(other.maximum.value);
        const Weights w = {scale_to(most.value), term.scale_to(most.value)};
        lost.sum.multiply(w.scale);
        sum.template take<COMPENSATED>(lost.sum, term.sum);
        return w;
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Softmax& lost, const Softmax& other) {
        join<COMPENSATED>(lost, other);
    }
    __device__ __forceinline__ void finish(const Softmax& lost) { sum.finish(lost.sum); }
    __device__ __forceinline__ Softmax of_lane(int mask) const {
        Softmax other = *this;
        for_each_number(other.maximum.value, [&](float& x, int, int) { x = __shfl_xor_sync(FULL_MASK, x, mask); });
        for_each_number(other.sum.value, [&](float& x, int, int) { x = __shfl_xor_sync(FULL_MASK, x, mask); });
        return other;
    }
    __device__ __forceinline__ void exchange(int mask) {
        Softmax lost;
        lost.lose();
        take<false>(lost, of_lane(mask));
    }
    __device__ __forceinline__ void save(StateAt& at, const Lanes& l) const {
        maximum.save(at, l);
        sum.save(at, l);
    }
    __device__ __forceinline__ void restore(StateAt& at, const Lanes& l) {
        maximum.restore(at, l);
        sum.restore(at, l);
    }
    __device__ __forceinline__ T total() const { return sum.value; }
    __device__ __forceinline__ T most(bool is_empty) const { return maximum.most(is_empty); }
};

// With the sum of exp(x - m) v.
template <class T, class V>
struct Weighted : Softmax<T> {
    Sum<V> vector;

    __device__ __forceinline__ void clear() {
        Softmax<T>::clear();
        vector.clear();
    }
    __device__ __forceinline__ void lose() {
        Softmax<T>::lose();
        vector.lose();
    }
    template <class Term>
    __device__ __forceinline__ void add(const T& x, const Term& v) {
        const typename Softmax<T>::Weights w = Softmax<T>::add(x);
        for_each_number(vector.value, [&](float& sum, int h, int c) {
            sum = fmaf(number_at(w.term, h, c), number_at(v, h, c), sum * number_at(w.scale, h, c));
        });
    }
    template <bool COMPENSATED>
    __device__ __forceinline__ void take(Weighted& lost, const Weighted& other) {
        const typename Softmax<T>::Weights w = Softmax<T>::template join<COMPENSATED>(lost, other);
        Sum<V> term = other.vector;
        vector.multiply(w.scale);
        lost.vector.multiply(w.scale);
        term.multiply(w.term);
        vector.template take<COMPENSATED>(lost.vector, term);
    }
    __device__ __forceinline__ void finish(const Weighted& lost) {
        Softmax<T>::finish(lost);
        vector.finish(lost.vector);
    }
    __device__ __forceinline__ void exchange(int mask) {
        Weighted other, lost;
        static_cast<Softmax<T>&>(other) = this->of_lane(mask);
        other.vector = vector;
        for_each_number(other.vector.value, [&](float& x, int, int) { x = __shfl_xor_sync(FULL_MASK, x, mask); });
        lost.lose();
        take<false>(lost, other);
    }
    __device__ __forceinline__ void save(StateAt& at, const Lanes& l) const {
        Softmax<T>::save(at, l);
        vector.save(at, l);
    }
    __device__ __forceinline__ void restore(StateAt& at, const Lanes& l) {
        Softmax<T>::restore(at, l);
        vector.restore(at, l);
    }
    template <class Scale>
    __device__ __forceinline__ V average(const Scale& inverse) const {
        Sum<V> scaled = vector;
        scaled.multiply(inverse);
        return scaled.value;
    }
};
