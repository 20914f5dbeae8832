// LayerNorm and RMSNorm of jets on the CPU. In jet arithmetic (jet.h), means over a row:
//   c = x − mean(x)  (RMSNorm: c = x),   r = (mean(c²) + eps)^(-1/2),   n = c r,   y = n weight + bias
// and backward, with ĝ the gradient's channels reversed and ĝ_n = ĝ weight:
//   x̂ = r (ĝ_n − mean(ĝ_n) − n mean(ĝ_n n))  (RMSNorm: without mean(ĝ_n)),   dweight = Σ (ĝ n)_uv,   dbias = Σ ĝ_uv
// A row is read once, into a buffer that stays in the first-level cache. Sums over rows are taken per task and then
// added in task order: the same bits for any number of threads.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "chunks.h"
#include "jet.h"

namespace compgen {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// One row of jets in the accumulation type, padded with zeros to whole vectors.
template <typename Scalar>
class Row {
 public:
  using T = Accumulate<Scalar>;
  using V = Vec<T>;
  static constexpr int kLanes = Simd<T>::kLanes;

  explicit Row(int64_t width) : width_(width), jets_(round_up(width, kLanes) * kChannels) {
    for (int lane = 0; lane < kLanes; ++lane) last_[lane] = width % kLanes == 0 || lane < width % kLanes;
  }

  int vectors() const { return jets_.size() / (kChannels * kLanes); }
  int count(int i) const { return std::min<int64_t>(kLanes, width_ - i * kLanes); }

  Jet<V> operator[](int i) const {
    const T* from = jets_.data() + i * kChannels * kLanes;
    return {load(from), load(from + kLanes), load(from + 2 * kLanes), load(from + 3 * kLanes)};
  }

  void set(int i, Jet<V> jet) {
    T* to = jets_.data() + i * kChannels * kLanes;
    store(to, jet.x), store(to + kLanes, jet.u), store(to + 2 * kLanes, jet.v), store(to + 3 * kLanes, jet.uv);
  }

  // Takes row `row` of x and makes it c; returns r.
  template <bool Centred>
  Jet<T> centre(const Channels<Scalar>& x, int64_t row, double eps) {
    Jet<V> total{}, power{};
    for (int i = 0; i < vectors(); ++i) {
      const Jet<V> jet = x.read(row * width_ + i * kLanes, count(i));
      set(i, jet);
      if (Centred) total += jet;
      else power += square(jet);
    }
    if constexpr (Centred) {
      const Jet<V> mean = in_every_lane(compgen::sum<T>(total) * (1 / static_cast<T>(width_)));
      for (int i = 0; i < vectors(); ++i) {
        Jet<V> c = (*this)[i] - mean;
        if (i + 1 == vectors()) c = c * last_;
        set(i, c);
        power += square(c);
      }
    }
    Jet<T> variance = compgen::sum<T>(power) * (1 / static_cast<T>(width_));
    variance.x += static_cast<T>(eps);
    return rsqrt(variance);
  }

 private:
  int64_t width_;
  Buffer<T> jets_;
  V last_{};  // 1 in the lanes of the last vector that belong to the row
};

// weight or bias in the accumulation type, padded to whole vectors; `absent` everywhere when there is none.
template <typename Scalar>
Buffer<Accumulate<Scalar>> parameter(const OptionalTensor& given, int64_t width, Accumulate<Scalar> absent) {
  Buffer<Accumulate<Scalar>> values(round_up(width, Simd<Accumulate<Scalar>>::kLanes), absent);
  if (given) {
    const Tensor dense = given->contiguous();
    std::copy_n(dense.const_data_ptr<Scalar>(), width, values.begin());
  }
  return values;
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(x.dim() > 1 && x.size(-1) > 0, "jet_norm: x has shape ", x.sizes(), "; expected [C, …, D], D at least 1");
  check_shape("jet_norm", "weight", weight, {x.size(-1)});
  check_shape("jet_norm", "bias", bias, {x.size(-1)});
}

template <bool Centred>
Tensor forward(const Tensor& x_in, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  check(x_in, weight, bias);
  const Tensor x = x_in.contiguous();
  Tensor y = empty_result(jet_sizes("jet_norm", x), x.options());
  const int64_t D = x.size(-1), rows = y.numel() / (kChannels * D);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "jet_norm", [&] {
    using T = Accumulate<scalar_t>;
    const Channels<scalar_t> from(x), to(y);
    const Buffer<T> w = parameter<scalar_t>(weight, D, 1), b = parameter<scalar_t>(bias, D, 0);
    for_each_chunk(1, rows, [&](Chunk chunk, int64_t) {
      Row<scalar_t> c(D);
      for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        const Jet<Vec<T>> r = in_every_lane(c.template centre<Centred>(from, row, eps));
        for (int i = 0; i < c.vectors(); ++i) {
          const int at = i * c.kLanes;
          Jet<Vec<T>> out = c[i] * r * load(&w[at]);
          out.x += load(&b[at]);
          to.write(row * D + at, out, c.count(i));
        }
      }
    });
  });
  return y;
}

template <bool Centred>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_in, const Tensor& x_in, const OptionalTensor& weight,
                                            double eps) {
  check(x_in, weight, std::nullopt);
  check_shape("jet_norm_backward", "grad", grad_in, jet_sizes("jet_norm_backward", x_in));
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous();
  const int64_t D = x.size(-1), rows = grad.numel() / (kChannels * D);
  Tensor grad_x = empty_result(x.sizes(), x.options());
  Tensor grad_weight = at::empty({D}, x.options()), grad_bias = at::empty({D}, x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "jet_norm_backward", [&] {
    using T = Accumulate<scalar_t>;
    using V = Vec<T>;
    const Channels<scalar_t> from(x), grads(grad), to(grad_x);
    const Buffer<T> w = parameter<scalar_t>(weight, D, 1);
    const int64_t padded = w.size();
    PartialSums<T> sums(1, rows, 2 * padded);
    for_each_chunk(1, rows, [&](Chunk chunk, int64_t task) {
      Row<scalar_t> n(D), g(D);
      T *dw = sums.of_task(task), *db = dw + padded;
      for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        const Jet<V> r = in_every_lane(n.template centre<Centred>(from, row, eps));
        Jet<V> total{}, along{};
        for (int i = 0; i < n.vectors(); ++i) {
          const int at = i * n.kLanes;
          const Jet<V> ni = n[i] * r, gi = grads.read(row * D + at, n.count(i)).reversed();
          store(db + at, load(db + at) + gi.uv);
          store(dw + at, load(dw + at) + (gi * ni).uv);
          const Jet<V> gn = gi * load(&w[at]);
          n.set(i, ni);
          g.set(i, gn);
          total += gn;
          along += gn * ni;
        }
        const T share = 1 / static_cast<T>(D);
        const Jet<V> mean = Centred ? in_every_lane(sum<T>(total) * share) : Jet<V>{};
        const Jet<V> slope = in_every_lane(sum<T>(along) * share);
        for (int i = 0; i < n.vectors(); ++i) {
          const Jet<V> out = r * (g[i] - mean - n[i] * slope);
          to.write(row * D + i * n.kLanes, out.reversed(), n.count(i));
        }
      }
    });
    const Buffer<T> total = sums.total(0);
    std::copy_n(total.begin(), D, grad_weight.mutable_data_ptr<scalar_t>());
    std::copy_n(total.begin() + padded, D, grad_bias.mutable_data_ptr<scalar_t>());
  });
  return {grad_x, grad_weight, grad_bias};
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  return forward<false>(x, weight, std::nullopt, eps);
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                             double eps) {
  const auto [grad_x, grad_weight, _] = backward<false>(grad, x, weight, eps);
  return {grad_x, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("jet_layer_norm", forward<true>);
  m.impl("jet_layer_norm_backward", backward<true>);
  m.impl("jet_rms_norm", rms_norm);
  m.impl("jet_rms_norm_backward", rms_norm_backward);
}

}  // namespace compgen
