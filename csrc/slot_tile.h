// The algebra of one tile: up to kRows pixel rows against the few slots of one image and head. Slot attention is made of
// three products, and they are one small matrix multiplication with different strides:
//   scores    s[r, j]     = rows[r, :] · slots[j, :]              (pixels × slots)
//   mix       out[r, :]   = Σ_j weights[j, r] slots[j, :]         (pixels × width)
//   gather    sums[j, :] += Σ_r weights[j, r] rows[r, :]          (slots × width)
// Weights are kept slot-major, [slots, kStride], so a softmax over slots is plain vertical arithmetic on rows of lanes.
#pragma once

#include <ATen/ATen.h>

#include <new>
#include <vector>

#include "simd.h"

namespace compgen {

constexpr int kRows = 48;            // a multiple of the lanes (4, 8) and of the row blocks (6, 12) below
constexpr int kStride = kRows + 8;  // between slots of a weight matrix: no multiple of 64 bytes, see multiply_block

// Scratch memory whose vectors never straddle two cache lines.
template <typename T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <typename T>
using Buffer = std::vector<T, LineAllocator<T>>;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows to bring into the cache while something else is computed, a few lines at a time: asked for all at once they would
// queue up and be waited for. Needed because heads lie strided in memory, where the hardware does not look ahead.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const void* first, int64_t stride, int rows, int bytes, bool to_write)
      : next_(static_cast<const char*>(first)), end_(next_ + rows * stride), stride_(stride), rows_(rows), bytes_(bytes),
        to_write_(to_write) {}

  void share_among(int calls) { share_ = (rows_ + calls - 1) / calls; }
  void next_share() {
    for (const char* end = std::min(next_ + share_ * stride_, end_); next_ < end; next_ += stride_)
      for (int byte = 0; byte < bytes_; byte += 64)
        to_write_ ? __builtin_prefetch(next_ + byte, 1) : __builtin_prefetch(next_ + byte, 0);
  }

 private:
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t stride_ = 1;
  int rows_ = 0, bytes_ = 0, share_ = 0;
  bool to_write_ = false;
};

// C[m, n] (+)= Σ_k A[m, k] B[k, n] for M rows and W vectors of n that start at `at`, all sums in registers. A is read one
// scalar at a time (any strides), B and C along contiguous n. `keep` zeroes lanes of the last vector that would be added
// twice.
template <typename T, int M, int W, bool Accumulate>
inline void multiply_block(const T* A, int64_t a_row, int64_t a_col, const T* B, int64_t b_row, T* C, int64_t c_row,
                           int K, const int (&at)[W], Vec<T> keep) {
  // Three rows share a pointer, so that M row addresses fit the integer registers: p, p + a_row, p + 2 a_row.
  constexpr int kPointers = (M + 2) / 3;
  const T* a_rows[kPointers];
  for (int p = 0; p < kPointers; ++p) a_rows[p] = A + 3 * p * a_row;
  const T* b_rows[W];
  for (int w = 0; w < W; ++w) b_rows[w] = B + at[w];
  Vec<T> sum[M][W] = {};
  const auto step = [&]<int Steps>() __attribute__((always_inline)) {
    Vec<T> b[Steps][W];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
#pragma GCC unroll 2
      for (int i = 0; i < Steps; ++i) b[i][w] = in_register(load(b_rows[w] + i * b_row));
      b_rows[w] += Steps * b_row;
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int i = 0; i < Steps; ++i) {
        const Vec<T> a = broadcast(a_rows[m / 3][m % 3 * a_row + i * a_col]);
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) sum[m][w] += a * b[i][w];
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPointers; ++p) a_rows[p] += Steps * a_col;
  };
  // Two steps at once where registers allow: neighbours in a row of A are then read together.
  constexpr int kSteps = W == 1 ? 2 : 1;
  int k = 0;
  for (; k + kSteps <= K; k += kSteps) step.template operator()<kSteps>();
  for (; k < K; ++k) step.template operator()<1>();
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      T* c = C + m * c_row + at[w];
      const Vec<T> kept = w == W - 1 ? sum[m][w] * keep : sum[m][w];
      store(c, Accumulate ? load(c) + kept : sum[m][w]);
    }
  }
}

// One block of M rows of C, all N columns. When N is no multiple of the lanes, the last vector is moved back to end at N:
// it overlaps its neighbour instead of running past the row, and never needs a masked access.
template <typename T, int M, int W, bool Accumulate>
__attribute__((noinline)) void multiply_rows(const T* A, int64_t a_row, int64_t a_col, const T* B, int64_t b_row, T* C,
                                             int64_t c_row, int K, int N, Prefetch& ahead) {
  constexpr int L = Simd<T>::kLanes;
  const Vec<T> all = broadcast(T(1)), last = N % L ? last_lanes<T>(N % L) : all;
  int n = 0;
  if constexpr (W == 2) {
    for (; n + L < N; n += 2 * L) {
      ahead.next_share();
      const bool ends = n + 2 * L >= N;
      multiply_block<T, M, 2, Accumulate>(A, a_row, a_col, B, b_row, C, c_row, K, {n, ends ? N - L : n + L},
                                          ends ? last : all);
    }
    if (n >= N) return;
  }
  ahead.next_share();
  multiply_block<T, M, 1, Accumulate>(A, a_row, a_col, B, b_row, C, c_row, K, {N - L}, last);
}

template <typename T, int M, int W, bool Accumulate, typename... Args>
inline void multiply_exactly(int rows, Args&&... args) {
  if (rows == M) return multiply_rows<T, M, W, Accumulate>(args...);
  if constexpr (M > 1) multiply_exactly<T, M - 1, W, Accumulate>(rows, args...);
}

// C[M, N] (+)= A[M, K] B[K, N] with N none or at least one vector, in blocks of rows of nearly equal height: 12 sums fill the
// register file, fewer leave the FMA pipeline waiting for its own results.
template <typename T, bool Accumulate>
inline void multiply(int M, int N, int K, const T* A, int64_t a_row, int64_t a_col, const T* B, int64_t b_row, T* C,
                     int64_t c_row, Prefetch ahead = {}) {
  constexpr int L = Simd<T>::kLanes;
  if (M == 0 || N == 0) return;
  const bool narrow = N <= L;
  const int most = narrow ? 12 : 6, blocks = (M + most - 1) / most;
  ahead.share_among(blocks * ((N + 2 * L - 1) / (2 * L)));
  for (int block = 0, m = 0; block < blocks; ++block) {
    const int rows = (M - m + blocks - block - 1) / (blocks - block);
    if (narrow)
      multiply_exactly<T, 12, 1, Accumulate>(rows, A + m * a_row, a_row, a_col, B, b_row, C + m * c_row, c_row, K, N, ahead);
    else
      multiply_exactly<T, 6, 2, Accumulate>(rows, A + m * a_row, a_row, a_col, B, b_row, C + m * c_row, c_row, K, N, ahead);
    m += rows;
  }
}

// The slots of one image and one head, packed twice: as rows [slots, width] and transposed [width, lanes·n] for scores.
template <typename T>
struct PackedSlots {
  int count, width;
  const T* rows;
  const T* columns;
  int padded() const { return round_up(count, Simd<T>::kLanes); }
};

// How much scratch `scores` needs against `slots` slots.
template <typename T>
inline size_t scratch_size(int slots) {
  return kRows * round_up(slots, Simd<T>::kLanes);
}

// weights[j, r] = rows[r, :] · slots[j, :] for r < count; rows beyond `count` of the tile hold anything finite.
template <typename T>
inline void scores(const T* rows, int64_t row_stride, int count, int width, const PackedSlots<T>& slots, T* weights,
                   T* scratch, Prefetch ahead) {
  constexpr int L = Simd<T>::kLanes;
  const int padded = slots.padded();
  multiply<T, false>(count, padded, width, rows, row_stride, 1, slots.columns, padded, scratch, padded, ahead);
  for (int r = 0; r < count; r += L) {
    for (int j = 0; j < padded; j += L) {
      Vec<T> square[L];
      for (int i = 0; i < L; ++i) square[i] = load(scratch + (r + i) * padded + j);
      transpose<T>(square);
      for (int i = 0; i < std::min(L, slots.count - j); ++i) store(weights + (j + i) * kStride + r, square[i]);
    }
  }
}

template <typename T>
inline void mix(const T* weights, int count, const PackedSlots<T>& slots, T* out, int64_t out_stride, Prefetch ahead) {
  multiply<T, false>(count, slots.width, slots.count, weights, 1, kStride, slots.rows, slots.width, out, out_stride,
                     ahead);
}

template <typename T>
inline void gather(const T* weights, int slot_count, const T* rows, int64_t row_stride, int count, int width, T* sums,
                   Prefetch ahead = {}) {
  multiply<T, true>(slot_count, width, count, weights, kStride, 1, rows, row_stride, sums, width, ahead);
}

template <typename T>
inline void add(Buffer<T>& to, const Buffer<T>& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

// One slot's row of weights: to += from + constant.
template <typename T>
inline void add(T* to, const T* from, T constant) {
  for (int r = 0; r < kRows; r += Simd<T>::kLanes) store(to + r, load(to + r) + (load(from + r) + constant));
}

// Lane i holds the sum of every kLanes-th value from i on, for i + kLanes · n < count.
template <typename T>
inline Vec<T> lane_sums(const T* values, int count) {
  constexpr int L = Simd<T>::kLanes;
  Vec<T> sums{};
  int i = 0;
  for (; i + L <= count; i += L) sums += load(values + i);
  for (int lane = 0; i + lane < count; ++lane) sums[lane] += values[i + lane];
  return sums;
}

// out[j, r] = Σ_h weights[h, j, r]
template <typename T>
inline void sum_heads(const Buffer<T>& weights, int64_t heads, Buffer<T>& out) {
  std::fill(out.begin(), out.end(), T(0));
  for (int64_t h = 0; h < heads; ++h)
    for (size_t i = 0; i < out.size(); ++i) out[i] += weights[h * out.size() + i];
}

// Softmax over the first axis of weights [competitors, kStride], in place.
template <typename T>
inline void softmax(T* weights, int competitors, int count) {
  if (competitors == 0) return;
  for (int r = 0; r < count; r += Simd<T>::kLanes) {
    T* column = weights + r;
    Vec<T> most = load(column);
    for (int j = 1; j < competitors; ++j) most = maximum<T>(most, load(column + j * kStride));
    Vec<T> mass{};
    for (int j = 0; j < competitors; ++j) {
      const Vec<T> e = exp_nonpositive(load(column + j * kStride) - most);
      store(column + j * kStride, e);
      mass += e;
    }
    const Vec<T> inverse = T(1) / mass;
    for (int j = 0; j < competitors; ++j) store(column + j * kStride, load(column + j * kStride) * inverse);
  }
}

// grads[j, r] becomes weights · (grads − Σ_j weights · grads): the softmax's Jacobian, in place over the first axis.
template <typename T>
inline void softmax_backward(const T* weights, T* grads, int competitors, int count) {
  for (int r = 0; r < count; r += Simd<T>::kLanes) {
    Vec<T> mean{};
    for (int j = 0; j < competitors; ++j) mean += load(weights + j * kStride + r) * load(grads + j * kStride + r);
    for (int j = 0; j < competitors; ++j) {
      T* grad = grads + j * kStride + r;
      store(grad, load(weights + j * kStride + r) * (load(grad) - mean));
    }
  }
}

}  // namespace compgen
