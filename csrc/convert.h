// Vectors of any floating type in the accumulation type, and back.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "simd.h"

namespace compgen {

// Eight halves to floats and back, rounded to the nearest, ties to even.
inline Vec<float> widen(const at::BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(16), aligned(2)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  const auto halves = *reinterpret_cast<const Halves*>(from);
  return std::bit_cast<Vec<float>>(__builtin_convertvector(halves, Words) << 16);
}

inline void narrow(at::BFloat16* to, Vec<float> x) {
  typedef uint16_t Halves __attribute__((vector_size(16), aligned(2)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  const auto bits = std::bit_cast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(x == x ? rounded : 0x7fc0 - Words{}, Halves);
}

inline Vec<float> widen(const at::Half* from) {
#ifdef __F16C__
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return {from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7]};
#endif
}

inline void narrow(at::Half* to, Vec<float> x) {
#ifdef __F16C__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < 8; ++lane) to[lane] = x[lane];
#endif
}

inline Vec<float> widen(const float* from) { return load(from); }
inline void narrow(float* to, Vec<float> x) { store(to, x); }
inline Vec<double> widen(const double* from) { return load(from); }
inline void narrow(double* to, Vec<double> x) { store(to, x); }

// Up to kLanes values of any type as a vector, zero in the lanes beyond `count`, and back.
template <typename T, typename Scalar>
inline Vec<T> load_as(const Scalar* from, int count) {
  constexpr int L = Simd<T>::kLanes;
  if (count >= L) return widen(from);
  Scalar lanes[L] = {};
  std::copy_n(from, count, lanes);
  return widen(lanes);
}

template <typename T, typename Scalar>
inline void store_as(Scalar* to, Vec<T> x, int count) {
  constexpr int L = Simd<T>::kLanes;
  if (count >= L) return narrow(to, x);
  Scalar lanes[L];
  narrow(lanes, x);
  std::copy_n(lanes, count, to);
}

// Calls work(at, lanes) for every vector of a row of `width`, the last one with the lanes that are left.
template <typename T, typename Work>
inline void for_each_vector(int64_t width, const Work& work) {
  constexpr int L = Simd<T>::kLanes;
  int64_t at = 0;
  for (; at + L <= width; at += L) work(at, L);
  if (at < width) work(at, static_cast<int>(width - at));
}

// A row of one type to a row of another, T the wider of the two.
template <typename T, typename From, typename To>
inline void copy_row(const From* from, int width, To* to) {
  constexpr int L = Simd<T>::kLanes;
  for (int d = 0; d < width; d += L) store_as<T>(to + d, load_as<T>(from + d, width - d), width - d);
}

}  // namespace compgen
