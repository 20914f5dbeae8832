// What GELU is made of: the normal distribution's tail, and e^x that ends at zero.
#pragma once

#include "simd.h"

namespace compgen {

// e^x for x <= 0 that ends at zero: powers of a large x multiply it.
inline Vec<float> decay(Vec<float> x) { return x < -87 ? Vec<float>{} : exp_nonpositive(x); }
inline Vec<double> decay(Vec<double> x) { return exp_nonpositive(x); }

// Φ(-|x|) / φ(x), the density without its constant. Float: t times a polynomial of degree 8 in t = 1 / (1 + 0.35 |x|),
// fitted to |x| < 13.3, where Φ(-|x|) is no longer a float; relative error 2e-7 over the whole range.
inline Vec<float> tail_over_density(Vec<float> magnitude, Vec<float>) {
  constexpr float kCoefficients[] = {0.14381891489f, -0.25539198518f, 0.15879763663f, -0.02284413204f,
                                     0.10539242625f, 0.11986302584f,  0.13985757530f, 0.13962166011f};
  const Vec<float> t = 1 / (1 + 0.35f * magnitude);
  Vec<float> p = broadcast(-0.02911511995f);
#pragma GCC unroll 8
  for (const float coefficient : kCoefficients) p = p * t + coefficient;
  return p * t;
}

inline Vec<double> tail_over_density(Vec<double> magnitude, Vec<double> density) {
  for (int lane = 0; lane < Simd<double>::kLanes; ++lane)
    magnitude[lane] = density[lane] > 0 ? 0.5 * std::erfc(magnitude[lane] * M_SQRT1_2) / density[lane] : 0;
  return magnitude;
}

template <typename V>
struct Normal {
  V below, density;  // Φ(x) and φ(x)
};

template <typename V>
inline Normal<V> normal(V x) {
  using T = std::remove_reference_t<decltype(x[0])>;
  const V e = decay(x * x * T(-0.5)), tail = e * tail_over_density(x > 0 ? x : -x, e);
  return {x > 0 ? 1 - tail : tail, e * T(0.3989422804014326779)};
}

}  // namespace compgen
