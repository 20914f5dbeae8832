// A transformer layer that a condition modulates, forward and backward, on the CPU. Between the eight products of
// matrices, which are a library's (gemm.h), lies what would be dozens of small ops over the whole batch:
//   h₁ = scale₁ norm(x) + shift₁            x₁ = x + gate₁ (attention(h₁ Wqkvᵀ) Wprojᵀ + bias)
//   h₂ = scale₂ norm(x₁) + shift₂           y = x₁ + gate₂ (gelu(h₂ W₁ᵀ + bias) W₂ᵀ + bias)
// Here each gap is one pass, image by image, and biases are added where their products are read.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "chunks.h"
#include "gemm.h"
#include "token_attention.h"

namespace compgen {
namespace {

using at::Tensor;

enum Part { kShift, kScale, kGate, kMlpShift, kMlpScale, kMlpGate, kParts };
constexpr double kEps = 1e-6;
constexpr int64_t kHidden = 4;  // the MLP's width, of the layer's

struct Weights {
  Tensor qkv, qkv_bias, proj, proj_bias, fc1, fc1_bias, fc2, fc2_bias;
};

// Rows [B·T, …] that share one block of memory: a pass that takes fresh memory waits for its pages.
class Pieces {
 public:
  Pieces(Tensor block, int64_t rows) : block_(std::move(block)), rows_(rows) {}

  Tensor take(int64_t width) {
    const int64_t begin = std::exchange(at_, at_ + rows_ * width);
    return block_.narrow(0, begin, rows_ * width).view({rows_, width});
  }

 private:
  Tensor block_;
  int64_t rows_, at_ = 0;
};

// What the backward pass needs of the forward one.
struct Kept {
  static int64_t width(int64_t W) { return (9 + 2 * kHidden) * W + 4; }

  Kept(const Tensor& block, int64_t rows, int64_t W) {
    Pieces pieces(block, rows);
    h1 = pieces.take(W), qkv = pieces.take(3 * W), attended = pieces.take(W), projected = pieces.take(W);
    x1 = pieces.take(W), h2 = pieces.take(W), out = pieces.take(W);
    active = pieces.take(kHidden * W), slope = pieces.take(kHidden * W);
    stats1 = pieces.take(2), stats2 = pieces.take(2);
  }

  // Products are without their bias; slope is gelu's; stats are mean and 1 / deviation of a row.
  Tensor h1, qkv, attended, projected, x1, h2, out, active, slope, stats1, stats2;
};

template <typename T>
T* data(const Tensor& x) {
  return const_cast<T*>(x.const_data_ptr<T>());
}

// x in the first `count` lanes, 0 in the others.
template <typename T>
inline Vec<T> first_lanes(Vec<T> x, int count) {
  return count == Simd<T>::kLanes ? x : x * (1 - last_lanes<T>(Simd<T>::kLanes - count));
}

// One layer's sizes and inputs, and the passes between its products. A pass works on the rows of one image.
template <typename T>
class Passes {
 public:
  Passes(const Tensor& x, const Tensor& modulation, const Weights& weights, int64_t heads, bool causal)
      : B(x.size(0)), tokens(x.size(1)), W(x.size(2)), heads_(heads), causal_(causal),
        x_(data<T>(x)), parts_(data<T>(modulation)), parts_stride_(modulation.stride(0)),
        qkv_bias_(data<T>(weights.qkv_bias)), proj_bias_(data<T>(weights.proj_bias)),
        fc1_bias_(data<T>(weights.fc1_bias)), fc2_bias_(data<T>(weights.fc2_bias)) {}

  const int64_t B, tokens, W;

  void enter(const Kept& kept) const {
    T *const h = data<T>(kept.h1), *const stats = data<T>(kept.stats1);
    for_each_row([&](int64_t b, int64_t row) {
      norm(x_ + row * W, part(b, kScale), part(b, kShift), h + row * W, stats + 2 * row);
    });
  }

  void attend(const Kept& kept) const {
    T *const qkv = data<T>(kept.qkv), *const out = data<T>(kept.attended);
    at::parallel_for(0, B, 1, [&](int64_t first, int64_t last) {
      TokenAttention<T> attention(tokens, W, heads_, causal_);
      for (int64_t row = first * tokens; row < last * tokens; row += tokens)
        attention.forward(qkv + row * 3 * W, qkv_bias_, out + row * W);
    });
  }

  void between(const Kept& kept) const {
    T *const product = data<T>(kept.projected), *const x1 = data<T>(kept.x1);
    T *const h = data<T>(kept.h2), *const stats = data<T>(kept.stats2);
    for_each_row([&](int64_t b, int64_t row) {
      add(x_ + row * W, part(b, kGate), product + row * W, proj_bias_, x1 + row * W);
      norm(x1 + row * W, part(b, kMlpScale), part(b, kMlpShift), h + row * W, stats + 2 * row);
    });
  }

  void activate(const Kept& kept) const {
    T *const actives = data<T>(kept.active), *const slopes = data<T>(kept.slope);
    for_each_row([&](int64_t, int64_t row) {
      T *const active = actives + row * kHidden * W, *const slope = slopes + row * kHidden * W;
      for_each_vector<T>(kHidden * W, [&](int64_t at, int count) {
        const Vec<T> u = load_as<T>(active + at, count) + load_as<T>(fc1_bias_ + at, count);
        const auto [below, density] = normal<Vec<T>>(u);
        store_as<T>(active + at, u * below, count);
        store_as<T>(slope + at, below + u * density, count);
      });
    });
  }

  void leave(const Kept& kept, const Tensor& y) const {
    T *const x1 = data<T>(kept.x1), *const product = data<T>(kept.out), *const out = data<T>(y);
    for_each_row([&](int64_t b, int64_t row) {
      add(x1 + row * W, part(b, kMlpGate), product + row * W, fc2_bias_, out + row * W);
    });
  }

  // Backward: the gradient of what a gate lets through, [B·T, W], and of the gate.
  void through_gate(Part gate, const Tensor& grad, const Tensor& product, const Tensor& to, const Tensor& parts) const {
    const T* const bias = gate == kGate ? proj_bias_ : fc2_bias_;
    T *const grads = data<T>(grad), *const products = data<T>(product), *const outs = data<T>(to);
    for_each_image(B, [&](int64_t b) {
      T* const of_gate = grad_part(parts, b, gate);
      std::fill_n(of_gate, W, T(0));
      for (int64_t row = b * tokens; row < (b + 1) * tokens; ++row) {
        const T *const g = grads + row * W, *const p = products + row * W;
        T* const out = outs + row * W;
        for_each_vector<T>(W, [&](int64_t at, int count) {
          const Vec<T> gi = load_as<T>(g + at, count);
          store_as<T>(out + at, gi * load_as<T>(part(b, gate) + at, count), count);
          const Vec<T> value = load_as<T>(p + at, count) + load_as<T>(bias + at, count);
          store_as<T>(of_gate + at, load_as<T>(of_gate + at, count) + gi * value, count);
        });
      }
    });
  }

  // grad [B·T, 4W] times gelu's slope, in place.
  void through_gelu(const Kept& kept, const Tensor& grad) const {
    T *const grads = data<T>(grad), *const slopes = data<T>(kept.slope);
    for_each_row([&](int64_t, int64_t row) {
      T *const g = grads + row * kHidden * W, *const slope = slopes + row * kHidden * W;
      for_each_vector<T>(kHidden * W, [&](int64_t at, int count) {
        store_as<T>(g + at, load_as<T>(g + at, count) * load_as<T>(slope + at, count), count);
      });
    });
  }

  void through_attention(const Kept& kept, const Tensor& grad, const Tensor& to) const {
    T *const qkv = data<T>(kept.qkv), *const grads = data<T>(grad), *const out = data<T>(to);
    at::parallel_for(0, B, 1, [&](int64_t first, int64_t last) {
      TokenAttention<T> attention(tokens, W, heads_, causal_);
      for (int64_t row = first * tokens; row < last * tokens; row += tokens)
        attention.backward(qkv + row * 3 * W, qkv_bias_, grads + row * W, out + row * 3 * W);
    });
  }

  // to = past + the gradient through a modulated norm of x, of h's; and of its shift and scale. With n = norm(x),
  // ĝ = g scale:  dx = (ĝ − mean(ĝ) − n mean(ĝ n)) / deviation,  dshift = Σ g,  dscale = Σ g n.
  void through_norm(Part shift, const Tensor& x, const Tensor& stats, const Tensor& grad, const Tensor& past,
                    const Tensor& to, const Tensor& parts) const {
    const T *const inputs = data<T>(x), *const grads = data<T>(grad), *const moments = data<T>(stats);
    T *const pasts = data<T>(past), *const outs = data<T>(to);
    for_each_image(B, [&](int64_t b) {
      T *const of_shift = grad_part(parts, b, shift), *const of_scale = of_shift + W;
      std::fill_n(of_shift, 2 * W, T(0));
      const T* const scale = part(b, shift) + W;
      for (int64_t row = b * tokens; row < (b + 1) * tokens; ++row) {
        const T *const xs = inputs + row * W, *const g = grads + row * W, *const before = pasts + row * W;
        const Vec<T> mean = broadcast(moments[2 * row]), inverse = broadcast(moments[2 * row + 1]);
        Vec<T> total{}, slope{};
        for_each_vector<T>(W, [&](int64_t at, int count) {
          const Vec<T> gi = load_as<T>(g + at, count), n = (load_as<T>(xs + at, count) - mean) * inverse;
          store_as<T>(of_shift + at, load_as<T>(of_shift + at, count) + gi, count);
          store_as<T>(of_scale + at, load_as<T>(of_scale + at, count) + gi * n, count);
          const Vec<T> scaled = gi * load_as<T>(scale + at, count);
          total += scaled, slope += scaled * n;
        });
        const Vec<T> middle = broadcast(sum<T>(total) / W), tilt = broadcast(sum<T>(slope) / W);
        T* const out = outs + row * W;
        for_each_vector<T>(W, [&](int64_t at, int count) {
          const Vec<T> n = (load_as<T>(xs + at, count) - mean) * inverse;
          const Vec<T> scaled = load_as<T>(g + at, count) * load_as<T>(scale + at, count);
          store_as<T>(out + at, load_as<T>(before + at, count) + (scaled - middle - n * tilt) * inverse, count);
        });
      }
    });
  }

 private:
  const T* part(int64_t b, Part which) const { return parts_ + b * parts_stride_ + which * W; }
  T* grad_part(const Tensor& parts, int64_t b, Part which) const { return data<T>(parts) + (b * kParts + which) * W; }

  template <typename Work>
  void for_each_row(const Work& work) const {
    for_each_image(B, [&](int64_t b) {
      for (int64_t row = b * tokens; row < (b + 1) * tokens; ++row) work(b, row);
    });
  }

  // h = scale norm(x) + shift, and the row's mean and 1 / deviation.
  void norm(const T* x, const T* scale, const T* shift, T* h, T* stats) const {
    Vec<T> total{}, power{};
    for_each_vector<T>(W, [&](int64_t at, int count) { total += load_as<T>(x + at, count); });
    const Vec<T> mean = broadcast(sum<T>(total) / W);
    for_each_vector<T>(W, [&](int64_t at, int count) {
      const Vec<T> c = first_lanes<T>(load_as<T>(x + at, count) - mean, count);
      power += c * c;
    });
    const T inverse = 1 / std::sqrt(sum<T>(power) / W + static_cast<T>(kEps));
    for_each_vector<T>(W, [&](int64_t at, int count) {
      const Vec<T> n = (load_as<T>(x + at, count) - mean) * inverse;
      store_as<T>(h + at, n * load_as<T>(scale + at, count) + load_as<T>(shift + at, count), count);
    });
    stats[0] = mean[0], stats[1] = inverse;
  }

  // out = x + gate (product + bias).
  void add(const T* x, const T* gate, const T* product, const T* bias, T* out) const {
    for_each_vector<T>(W, [&](int64_t at, int count) {
      const Vec<T> value = load_as<T>(product + at, count) + load_as<T>(bias + at, count);
      store_as<T>(out + at, load_as<T>(x + at, count) + load_as<T>(gate + at, count) * value, count);
    });
  }

  int64_t heads_;
  bool causal_;
  const T *x_, *parts_;
  int64_t parts_stride_;
  const T *qkv_bias_, *proj_bias_, *fc1_bias_, *fc2_bias_;
};

// What the loops trust, for callers of the raw op.
void check(const Tensor& x, const Tensor& modulation, const Weights& w, int64_t heads) {
  TORCH_CHECK(x.dim() == 3 && x.size(1) > 0 && x.size(2) > 0, "trunk_block: x has shape ", x.sizes(),
              "; expected [B, T, W], T and W at least 1");
  const int64_t W = x.size(2);
  TORCH_CHECK(heads > 0 && W % heads == 0, "trunk_block: ", heads, " heads do not divide a width of ", W);
  check_shape("trunk_block", "modulation", modulation, {x.size(0), kParts, W});
  check_shape("trunk_block", "qkv_weight", w.qkv, {3 * W, W});
  check_shape("trunk_block", "qkv_bias", w.qkv_bias, {3 * W});
  check_shape("trunk_block", "proj_weight", w.proj, {W, W});
  check_shape("trunk_block", "proj_bias", w.proj_bias, {W});
  check_shape("trunk_block", "fc1_weight", w.fc1, {kHidden * W, W});
  check_shape("trunk_block", "fc1_bias", w.fc1_bias, {kHidden * W});
  check_shape("trunk_block", "fc2_weight", w.fc2, {W, kHidden * W});
  check_shape("trunk_block", "fc2_bias", w.fc2_bias, {W});
  for (const Tensor& each : {modulation, w.qkv, w.qkv_bias, w.proj, w.proj_bias, w.fc1, w.fc1_bias, w.fc2, w.fc2_bias})
    TORCH_CHECK(each.scalar_type() == x.scalar_type(), "trunk_block: x is ", x.scalar_type(), " and another input ",
                each.scalar_type(), "; expected one type");
}

// [B, 6, W] such that an image's parts lie side by side.
Tensor dense_parts(const Tensor& modulation) {
  return modulation.stride(2) == 1 && modulation.stride(1) == modulation.size(2) ? modulation : modulation.contiguous();
}

Weights contiguous(const Weights& w) {
  return {w.qkv.contiguous(), w.qkv_bias.contiguous(), w.proj.contiguous(), w.proj_bias.contiguous(),
          w.fc1.contiguous(), w.fc1_bias.contiguous(), w.fc2.contiguous(), w.fc2_bias.contiguous()};
}

std::tuple<Tensor, Tensor> forward(const Tensor& x_in, const Tensor& modulation_in, const Tensor& qkv,
                                   const Tensor& qkv_bias, const Tensor& proj, const Tensor& proj_bias,
                                   const Tensor& fc1, const Tensor& fc1_bias, const Tensor& fc2, const Tensor& fc2_bias,
                                   int64_t heads, bool causal) {
  const Weights weights = contiguous({qkv, qkv_bias, proj, proj_bias, fc1, fc1_bias, fc2, fc2_bias});
  check(x_in, modulation_in, weights, heads);
  const Tensor x = x_in.contiguous(), modulation = dense_parts(modulation_in);
  const int64_t W = x.size(2), rows = x.size(0) * x.size(1);
  Tensor y = empty_result(x.sizes(), x.options());
  Tensor block = empty_result({rows * Kept::width(W)}, x.options());
  const Kept kept(block, rows, W);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "trunk_block", [&] {
    const Passes<scalar_t> passes(x, modulation, weights, heads, causal);
    passes.enter(kept);
    product(kept.h1, weights.qkv.t(), kept.qkv);
    passes.attend(kept);
    product(kept.attended, weights.proj.t(), kept.projected);
    passes.between(kept);
    product(kept.h2, weights.fc1.t(), kept.active);
    passes.activate(kept);
    product(kept.active, weights.fc2.t(), kept.out);
    passes.leave(kept, y);
  });
  return {y, block};
}

// The gradient of a layer's weight and bias, of its output's rows and from its input's.
std::tuple<Tensor, Tensor> of_weights(const Tensor& grad, const Tensor& input) {
  Tensor weight = at::empty({grad.size(1), input.size(1)}, grad.options());
  product(grad.t(), input, weight);
  return {weight, grad.sum(0)};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& grad_in, const Tensor& block, const Tensor& x_in, const Tensor& modulation_in,
                   const Tensor& qkv, const Tensor& qkv_bias, const Tensor& proj, const Tensor& proj_bias,
                   const Tensor& fc1, const Tensor& fc1_bias, const Tensor& fc2, const Tensor& fc2_bias, int64_t heads,
                   bool causal) {
  const Weights weights = contiguous({qkv, qkv_bias, proj, proj_bias, fc1, fc1_bias, fc2, fc2_bias});
  check(x_in, modulation_in, weights, heads);
  check_shape("trunk_block_backward", "grad", grad_in, x_in.sizes());
  const int64_t W = x_in.size(2), rows = x_in.size(0) * x_in.size(1);
  check_shape("trunk_block_backward", "kept", block, {rows * Kept::width(W)});
  const Tensor grad = grad_in.contiguous(), x = x_in.contiguous(), modulation = dense_parts(modulation_in);
  const Kept kept(block, rows, W);
  Pieces pieces(empty_result({rows * (6 + kHidden) * W}, x.options()), rows);
  const Tensor narrow = pieces.take(W), other = pieces.take(W), of_x1 = pieces.take(W), of_qkv = pieces.take(3 * W);
  const Tensor hidden = pieces.take(kHidden * W), of_x = empty_result(x.sizes(), x.options());
  const Tensor parts = at::empty({x.size(0), kParts, W}, x.options());
  std::tuple<Tensor, Tensor> at_qkv, at_proj, at_fc1, at_fc2;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "trunk_block_backward", [&] {
    const Passes<scalar_t> passes(x, modulation, weights, heads, causal);
    passes.through_gate(kMlpGate, grad, kept.out, narrow, parts);
    at_fc2 = of_weights(narrow, kept.active);
    product(narrow, weights.fc2, hidden);
    passes.through_gelu(kept, hidden);
    at_fc1 = of_weights(hidden, kept.h2);
    product(hidden, weights.fc1, other);
    passes.through_norm(kMlpShift, kept.x1, kept.stats2, other, grad, of_x1, parts);
    passes.through_gate(kGate, of_x1, kept.projected, narrow, parts);
    at_proj = of_weights(narrow, kept.attended);
    product(narrow, weights.proj, other);
    passes.through_attention(kept, other, of_qkv);
    at_qkv = of_weights(of_qkv, kept.h1);
    product(of_qkv, weights.qkv, narrow);
    passes.through_norm(kShift, x, kept.stats1, narrow, of_x1, of_x, parts);
  });
  return std::tuple_cat(std::tuple(of_x, parts), at_qkv, at_proj, at_fc1, at_fc2);
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("trunk_block", forward);
  m.impl("trunk_block_backward", backward);
}

}  // namespace compgen
