// Vectors of 32 bytes: 8 floats or 4 doubles, in the compiler's own vector types, so the same source becomes AVX2,
// NEON pairs or plain SSE. What is here is what slot attention needs beyond + and *: broadcast, transpose, exp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace compgen {

template <typename T>
struct Simd {
  typedef T Vec __attribute__((vector_size(32)));
  typedef T Unaligned __attribute__((vector_size(32), aligned(alignof(T))));
  using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Int Mask __attribute__((vector_size(32)));
  static constexpr int kLanes = 32 / sizeof(T);
};

template <typename T>
using Vec = typename Simd<T>::Vec;

template <typename T>
inline Vec<T> load(const T* from) {
  return *reinterpret_cast<const typename Simd<T>::Unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vec<T> x) {
  *reinterpret_cast<typename Simd<T>::Unaligned*>(to) = x;
}

template <typename T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

// Keeps the compiler from reading x from memory again at each use.
template <typename V>
inline V in_register(V x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}

template <typename T>
inline Vec<T> maximum(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

template <typename T>
inline T sum(Vec<T> x) {
  T total = 0;
  for (int lane = 0; lane < Simd<T>::kLanes; ++lane) total += x[lane];
  return total;
}

// 1 in the last `count` lanes, 0 before.
template <typename T>
inline Vec<T> last_lanes(int count) {
  Vec<T> x;
  for (int lane = 0; lane < Simd<T>::kLanes; ++lane) x[lane] = lane >= Simd<T>::kLanes - count;
  return x;
}

// Swaps the off-diagonal blocks of width `Step` between rows i and i + Step; doing it for 1, 2, 4 transposes a square.
template <typename T, int Step>
inline void swap_blocks(Vec<T>* rows) {
  constexpr int L = Simd<T>::kLanes;
  typename Simd<T>::Mask upper, lower;
  for (int lane = 0; lane < L; ++lane) {
    upper[lane] = lane & Step ? lane - Step + L : lane;
    lower[lane] = lane & Step ? lane + L : lane + Step;
  }
  for (int i = 0; i < L; ++i) {
    if (i & Step) continue;
    const Vec<T> a = rows[i], b = rows[i + Step];
    rows[i] = __builtin_shuffle(a, b, upper);
    rows[i + Step] = __builtin_shuffle(a, b, lower);
  }
}

// A square of kLanes × kLanes in registers becomes its transpose.
template <typename T>
inline void transpose(Vec<T>* rows) {
  if constexpr (Simd<T>::kLanes == 8) swap_blocks<T, 4>(rows);
  swap_blocks<T, 2>(rows);
  swap_blocks<T, 1>(rows);
}

// e^x for x <= 0. Float: x = n ln 2 + r with |r| <= ln2 / 2, a degree-6 polynomial for e^r (error about 1 ulp), and 2^n
// put into the exponent bits; below -87 the result is a denormal that no softmax can tell from e^-87.
inline Vec<float> exp_nonpositive(Vec<float> x) {
  x = maximum<float>(x, broadcast(-87.0f));
  const Vec<float> shifter = broadcast(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer held in the low bits
  const Vec<float> shifted = x * 1.44269504089f + shifter;
  const Vec<float> n = shifted - shifter;
  Vec<float> r = x - n * 0.693145751953125f;
  r = r - n * 1.42860682030941723212e-6f;
  Vec<float> p = broadcast(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto bits = std::bit_cast<Simd<float>::Mask>(shifted) << 23;
  return std::bit_cast<Vec<float>>(std::bit_cast<Simd<float>::Mask>(p) + bits);
}

// Double is the precision of gradcheck and of oracles, not of training: libm's exp, lane by lane.
inline Vec<double> exp_nonpositive(Vec<double> x) {
  for (int lane = 0; lane < Simd<double>::kLanes; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

}  // namespace compgen
