// Products of matrices by a library: oneDNN where torch was built with it, else what torch itself would take, MKL. oneDNN
// asks what the CPU can do and MKL who made it: on AMD's with AVX-512, MKL's products take twice as long.
#pragma once

#include <ATen/ATen.h>
#include <ATen/ops/mm.h>

namespace at::native {
// torch exports it and ships no header for it; weak, so that a torch without it still loads what is built here.
__attribute__((weak)) void mkldnn_matmul(const Tensor&, const Tensor&, const Tensor&, float beta, float alpha);
}  // namespace at::native

namespace compgen {

// out [M, N] = a [M, K] b [K, N]; a and b may be transposed views.
inline void product(const at::Tensor& a, const at::Tensor& b, at::Tensor out) {
  const bool wide = a.scalar_type() == at::kFloat && at::native::mkldnn_matmul != nullptr;
  if (!wide || out.numel() == 0 || a.numel() == 0) {
    at::mm_out(out, a, b);
    return;
  }
  // oneDNN adds all K terms one after the other. Of many of one sign, as in the gradient of a weight, the sum would then be
  // several times less exact than MKL's, so it is taken in runs.
  constexpr int64_t kRun = 256;
  const int64_t depth = a.size(1);
  for (int64_t run = 0; run < depth; run += kRun) {
    const int64_t terms = std::min(kRun, depth - run);
    at::native::mkldnn_matmul(a.narrow(1, run, terms), b.narrow(0, run, terms), out, run == 0 ? 0.0f : 1.0f, 1.0f);
  }
}

}  // namespace compgen
