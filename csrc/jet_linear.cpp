// A linear map of jets on the CPU, y_c = x_c Wᵀ on every channel and the bias on the value alone, as one tall product of
// all channels' rows. W is packed once into panels; then a block of rows at a time meets every panel, so that W comes
// from the second-level cache and each row from memory once. Libraries do worse here on two counts: at widths such as
// 12 × 43 or 180 MKL loses a quarter of its speed, and a result is new memory at every call, whose first touch costs
// a tenth of the product (memory.h).
#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "rows.h"

namespace compgen {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 4;  // blocks of rows in a task

// Wᵀ [I, O] as panels of kWidth columns, O >= kWidth. The last panel ends at O and overlaps its neighbour: what they share
// is computed twice, and no access needs a mask.
template <typename T>
class Panels {
 public:
  static constexpr int kWidth = 2 * Simd<T>::kLanes;

  explicit Panels(const Tensor& weight)
      : I(weight.size(1)), O(weight.size(0)), data_(round_up(O, kWidth) * I) {
    const T* from = weight.const_data_ptr<T>();
    const int64_t row = weight.stride(0), column = weight.stride(1);
    T* to = data_.data();
    for (int64_t panel = 0; panel < O; panel += kWidth)
      for (int64_t i = 0; i < I; ++i)
        for (int64_t o = begin(panel); o < begin(panel) + kWidth; ++o) *to++ = from[o * row + i * column];
  }

  // y [rows, O] = x [rows, I] Wᵀ for at most kRows rows.
  void multiply(const T* x, int rows, T* y) const {
    for (int64_t panel = 0; panel < O; panel += kWidth)
      for (int64_t i = 0; i < I; i += kDepth) {
        const int depth = std::min<int64_t>(kDepth, I - i);
        const T* W = data_.data() + panel * I + i * kWidth;
        T* to = y + begin(panel);
        const Prefetch next(y + begin(panel + kWidth), O * sizeof(T), rows, kWidth * sizeof(T), true);
        if (i == 0) compgen::multiply<T, false>(rows, kWidth, depth, x + i, I, 1, W, kWidth, to, O, next);
        else compgen::multiply<T, true>(rows, kWidth, depth, x + i, I, 1, W, kWidth, to, O);
      }
  }

 private:
  static constexpr int kDepth = 320;  // so much of a panel stays in the first-level cache with the rows it meets

  int64_t begin(int64_t panel) const { return std::min(panel, O - kWidth); }

  int64_t I, O;
  Buffer<T> data_;
};

// y = x Wᵀ, and the bias on the first `biased` rows, added while they are in the cache.
void tall_product(const Tensor& x, const Tensor& weight, const float* bias, int64_t biased, Tensor& y) {
  const Panels<float> panels(weight);
  const int64_t rows = x.size(0), I = x.size(1), O = y.size(1);
  at::parallel_for(0, (rows + kRows - 1) / kRows, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t row = first * kRows; row < std::min(last * kRows, rows); row += kRows) {
      const int count = std::min<int64_t>(kRows, rows - row);
      float* out = y.mutable_data_ptr<float>() + row * O;
      panels.multiply(x.const_data_ptr<float>() + row * I, count, out);
      for (int64_t r = 0; bias && r < std::min<int64_t>(count, biased - row); ++r)
        for (int64_t o = 0; o < O; ++o) out[r * O + o] += bias[o];
    }
  });
}

// Whether packing W pays. A library serves the rest, and the precisions that are not trained in.
bool is_tall(const Tensor& x, const Tensor& weight) {
  return x.scalar_type() == at::kFloat && x.size(0) > 4 * kRows && x.size(1) > 0 &&
         weight.size(0) >= Panels<float>::kWidth;
}

Tensor jet_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias_in) {
  TORCH_CHECK(x.dim() >= 2 && weight.dim() == 2 && x.size(-1) == weight.size(1), "jet_linear: x has shape ", x.sizes(),
              " and weight ", weight.sizes(), "; expected [C, …, I] and [O, I]");
  TORCH_CHECK(!bias_in || bias_in->sizes() == weight.sizes().slice(0, 1), "jet_linear: bias does not have shape [O]");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  Tensor y = empty_result(sizes, x.options());
  Tensor to = y.flatten(0, -2);
  const Tensor rows = x.flatten(0, -2).contiguous();
  const std::optional<Tensor> bias = contiguous(bias_in);
  if (is_tall(rows, weight)) {
    tall_product(rows, weight, bias ? bias->const_data_ptr<float>() : nullptr, to.size(0) / y.size(0), to);
  } else {
    at::mm_out(to, rows, weight.t());
    if (bias) y.select(0, 0).add_(*bias);
  }
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) { m.impl("jet_linear", jet_linear); }

}  // namespace compgen
