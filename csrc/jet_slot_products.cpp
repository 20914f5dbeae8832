// The matrix products of folded slot attention on jets, on the CPU: the three gradients of one trilinear form (the formulas
// stand in compgen_fast/ops/jet_slot_products.py). A library's products, into memory that is kept (memory.h): the first
// touch of a fresh result costs a third of the product that fills it.
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "memory.h"

namespace compgen {
namespace {

using at::Tensor;

constexpr int64_t kMoved = 4;  // channels of pixels that slots move; of others there is one

int64_t channels_of(const Tensor& weights) { return weights.size(0) == 2 ? 1 : kMoved; }

// Adds to `result`, or begins it.
void multiply_into(Tensor result, const Tensor& a, const Tensor& b, bool begins) {
  if (begins) at::bmm_out(result, a, b);
  else at::baddbmm_out(result, result, a, b);
}

Tensor products(const Tensor& pixels, const Tensor& slots, int64_t first) {
  const int64_t C = pixels.size(0), B = slots.size(1), M = slots.size(2), N = pixels.size(2), T = C == kMoved ? 3 : 1;
  Tensor weights = empty_result({C + T, B, M, N}, pixels.options());
  if (pixels.size(1) != B) {
    Tensor rows = weights.view({2 * B * M, N});
    at::mm_out(rows, slots.reshape({2 * B * M, slots.size(3)}), pixels[0][0].t());
    return weights;
  }
  for (int64_t c = 0; c < C; ++c) multiply_into(weights[c], slots[0], pixels[c].mT(), true);
  for (int64_t t = 0; t < T; ++t) multiply_into(weights[C + t], slots[1], pixels[first + t].mT(), true);
  return weights;
}

Tensor mix(const Tensor& weights, const Tensor& slots, int64_t first, int64_t images) {
  const int64_t C = channels_of(weights), B = slots.size(1), M = slots.size(2), N = weights.size(3), Q = slots.size(3);
  Tensor pixels = empty_result({C, images, N, Q}, weights.options());
  if (images != B) {
    Tensor rows = pixels.view({N, Q});
    at::mm_out(rows, weights.reshape({2 * B * M, N}).t(), slots.reshape({2 * B * M, Q}));
    return pixels;
  }
  for (int64_t c = 0; c < C; ++c) multiply_into(pixels[c], weights[c].mT(), slots[0], true);
  for (int64_t t = 0; C + t < weights.size(0); ++t)
    multiply_into(pixels[first + t], weights[C + t].mT(), slots[1], false);
  return pixels;
}

Tensor sums(const Tensor& weights, const Tensor& pixels, int64_t first) {
  const int64_t C = pixels.size(0), B = weights.size(1), M = weights.size(2), N = weights.size(3), Q = pixels.size(3);
  Tensor slots = at::empty({2, B, M, Q}, weights.options());
  if (pixels.size(1) != B) {
    Tensor rows = slots.view({2 * B * M, Q});
    at::mm_out(rows, weights.reshape({2 * B * M, N}), pixels[0][0]);
    return slots;
  }
  for (int64_t c = 0; c < C; ++c) multiply_into(slots[0], weights[c], pixels[c], c == 0);
  for (int64_t t = 0; C + t < weights.size(0); ++t)
    multiply_into(slots[1], weights[C + t], pixels[first + t], t == 0);
  return slots;
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("jet_slot_products", products);
  m.impl("jet_slot_mix", mix);
  m.impl("jet_slot_sums", sums);
}

}  // namespace compgen
