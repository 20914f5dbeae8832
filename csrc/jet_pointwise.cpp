// GELU and SiLU of jets on the CPU: y = f(x) and, backward, x̂ = f'(x)·ĝ, in jet arithmetic (jet.h). Both functions,
// and GELU's approximation, are x · gate(x); what differs is the gate and its first three derivatives.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "gelu.h"
#include "jet.h"

namespace compgen {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 64;  // blocks in a task

template <typename V>
struct Derivatives {
  V f, d1, d2, d3;
};

template <typename V>
inline Derivatives<V> gated(V x, Derivatives<V> gate) {
  return {x * gate.f, gate.f + x * gate.d1, gate.d1 + gate.d1 + x * gate.d2,
          gate.d2 + gate.d2 + gate.d2 + x * gate.d3};
}

template <typename V>
inline Derivatives<V> sigmoid(V x) {
  const V e = decay(x > 0 ? -x : x), inverse = 1 / (1 + e);  // e^-|x|: σ(|x|) = 1/(1+e), σ(-|x|) = e/(1+e)
  const V s = x > 0 ? inverse : e * inverse, d1 = e * inverse * inverse;
  return {s, d1, d1 * (1 - 2 * s), d1 * (1 - 6 * d1)};
}

struct Gelu {
  template <typename V>
  static Derivatives<V> at(V x) {
    const auto [below, density] = normal<V>(x);
    return gated<V>(x, {below, density, -x * density, (x * x - 1) * density});
  }
};

struct TanhGelu {
  template <typename V>
  static Derivatives<V> at(V x) {
    constexpr double kC = 2 * 0.7978845608028653559, kA = 0.044715 * kC;
    using T = std::remove_reference_t<decltype(x[0])>;
    const V x2 = x * x, slope = T(kC) + T(3 * kA) * x2, second = T(6 * kA) * x;
    const T third = 6 * kA;
    const auto [s, d1, d2, d3] = sigmoid<V>(x * (T(kC) + T(kA) * x2));
    return gated<V>(x, {s, d1 * slope, d2 * slope * slope + d1 * second,
                        (d3 * slope * slope + 3 * d2 * second) * slope + d1 * third});
  }
};

struct Silu {
  template <typename V>
  static Derivatives<V> at(V x) {
    return gated<V>(x, sigmoid<V>(x));
  }
};

// Calls work(at, count) for every block of a channel of `size` elements.
template <typename Scalar, typename Work>
void for_each_block(int64_t size, const Work& work) {
  constexpr int64_t kSize = JetBlock<Scalar>::kSize;
  at::parallel_for(0, (size + kSize - 1) / kSize, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t at = first * kSize; at < std::min(last * kSize, size); at += kSize)
      work(at, static_cast<int>(std::min(kSize, size - at)));
  });
}

template <typename Function>
Tensor forward(const Tensor& x_in) {
  const Tensor x = x_in.contiguous();
  Tensor y = empty_result(jet_sizes("jet_pointwise", x), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "jet_pointwise", [&] {
    using V = Vec<Accumulate<scalar_t>>;
    const Channels<scalar_t> from(x), to(y);
    for_each_block<scalar_t>(y.numel() / kChannels, [&](int64_t at, int count) {
      JetBlock<scalar_t> block;
      block.read(from, at, count);
      for (int i = 0; i * block.kLanes < count; ++i) {
        const auto f = Function::template at<V>(block[i].x);
        block.set(i, apply(block[i], f.f, f.d1, f.d2));
      }
      block.write(to, at, count);
    });
  });
  return y;
}

template <typename Function>
Tensor backward(const Tensor& grad_in, const Tensor& x_in) {
  check_shape("jet_pointwise_backward", "grad", grad_in, jet_sizes("jet_pointwise_backward", x_in));
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous();
  Tensor grad_x = empty_result(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "jet_pointwise_backward", [&] {
    using V = Vec<Accumulate<scalar_t>>;
    const Channels<scalar_t> from(x), grads(grad), to(grad_x);
    for_each_block<scalar_t>(grad.numel() / kChannels, [&](int64_t at, int count) {
      JetBlock<scalar_t> block, g;
      block.read(from, at, count);
      g.read(grads, at, count);
      for (int i = 0; i * block.kLanes < count; ++i) {
        const auto f = Function::template at<V>(block[i].x);
        block.set(i, (apply(block[i], f.d1, f.d2, f.d3) * g[i].reversed()).reversed());
      }
      block.write(to, at, count);
    });
  });
  return grad_x;
}

Tensor gelu(const Tensor& x, bool tanh) { return tanh ? forward<TanhGelu>(x) : forward<Gelu>(x); }

Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  return tanh ? backward<TanhGelu>(grad, x) : backward<Gelu>(grad, x);
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("jet_gelu", gelu);
  m.impl("jet_gelu_backward", gelu_backward);
  m.impl("jet_silu", forward<Silu>);
  m.impl("jet_silu_backward", backward<Silu>);
}

}  // namespace compgen
