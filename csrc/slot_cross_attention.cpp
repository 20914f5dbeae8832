// slot_cross_attention on the CPU. Pixels q [B,N,H,D] attend to slots k, v [B,S,H,D]:
//   p = softmax_s(scale q·k),  o = Σ_s p v,  w = mean_h p
// and backward, with p recomputed from q and k:
//   dp = do·v + dw/H,  ds = p (dp − Σ_s p dp),  dq = scale Σ_s ds k,  dk = scale Σ_n ds q,  dv = Σ_n p do
// A task is a run of kChunk pixels of one image with all heads; it walks tiles of kRows pixels. Sums over pixels are
// taken per task and then added in task order: the same bits for any number of threads.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "chunks.h"

namespace compgen {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename Scalar>
void forward_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<int>& live, double scale,
                   Chunk chunk, Tensor& out, Tensor& weights) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(2), D = q.size(3), b = chunk.image;
  const int J = live.size();
  SlotPack<Scalar> keys, values;
  keys.template fill<Scalar>(k, b, live, scale);
  values.template fill<Scalar>(v, b, live, 1);

  RowTile<Scalar> queries(q), outputs(out);
  Buffer<T> p(J * kStride), w(J * kStride), scratch(scratch_size<T>(J));
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    std::fill(w.begin(), w.end(), T(0));
    for (int64_t h = 0; h < H; ++h) {
      queries.read(b, n, h, count);
      scores(queries.data(), queries.stride(), count, D, keys.head(h), p.data(), scratch.data(),
             queries.after(h));
      softmax(p.data(), J, count);
      add(w, p);
      outputs.write(b, n, h);
      mix(p.data(), count, values.head(h), outputs.data(), outputs.stride(), outputs.after(h, true));
      outputs.finish(count);
    }
    if (weights.numel()) store_weights<Scalar>(w.data(), live, count, T(1) / H, b, n, weights);
  }
}

template <typename Scalar>
void backward_chunk(const Tensor& grad_out, const OptionalTensor& grad_weights, const Tensor& q, const Tensor& k,
                    const Tensor& v, const std::vector<int>& live, double scale, Chunk chunk, Tensor& grad_q,
                    Accumulate<Scalar>* dk, Accumulate<Scalar>* dv) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(2), D = q.size(3), b = chunk.image;
  const int J = live.size(), width = tile_width<Scalar>(D);
  SlotPack<Scalar> keys, values;
  keys.template fill<Scalar>(k, b, live, scale);
  values.template fill<Scalar>(v, b, live, 1);

  RowTile<Scalar> queries(q), grads(grad_out), query_grads(grad_q);
  Buffer<T> p(J * kStride), ds(J * kStride), dw(J * kStride), scratch(scratch_size<T>(J));
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    if (grad_weights) load_weights<Scalar>(*grad_weights, b, n, live, count, T(1) / H, dw.data());
    for (int64_t h = 0; h < H; ++h) {
      queries.read(b, n, h, count);
      grads.read(b, n, h, count);
      scores(queries.data(), queries.stride(), count, D, keys.head(h), p.data(), scratch.data(),
             queries.after(h));
      softmax(p.data(), J, count);
      scores(grads.data(), grads.stride(), count, D, values.head(h), ds.data(), scratch.data(),
             grads.after(h));
      if (grad_weights) add(ds, dw);
      softmax_backward(p.data(), ds.data(), J, count);

      query_grads.write(b, n, h);
      mix(ds.data(), count, keys.head(h), query_grads.data(), query_grads.stride(), query_grads.after(h, true));
      query_grads.finish(count);
      gather(ds.data(), J, queries.data(), queries.stride(), count, width, dk + h * J * width);
      gather(p.data(), J, grads.data(), grads.stride(), count, width, dv + h * J * width);
    }
  }
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& slot_mask) {
  const char* op = "slot_cross_attention";
  const int64_t B = q.size(0), N = q.size(1), H = q.size(2), D = q.size(3), S = k.size(1);
  check_shape(op, "q", q, {B, N, H, D});
  check_shape(op, "k", k, {B, S, H, D});
  check_shape(op, "v", v, {B, S, H, D});
  check_shape(op, "slot_mask", slot_mask, {B, S});
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                   const OptionalTensor& slot_mask_in, double scale, bool return_weights) {
  check(q_in, k_in, v_in, slot_mask_in);
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const OptionalTensor slot_mask = contiguous(slot_mask_in);
  const int64_t B = q.size(0), N = q.size(1), S = k.size(1);
  Tensor out = empty_result(q.sizes(), q.options());
  Tensor weights = return_weights ? empty_result({B, N, S}, q.options()) : at::empty({0}, q.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "slot_cross_attention", [&] {
    for_each_chunk(B, N, [&](Chunk chunk, int64_t) {
      forward_chunk<scalar_t>(q, k, v, live_slots(slot_mask, chunk.image, S), scale, chunk, out, weights);
    });
  });
  return {out, weights};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_out_in, const OptionalTensor& grad_weights_in,
                                            const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                            const OptionalTensor& slot_mask_in, double scale) {
  check(q_in, k_in, v_in, slot_mask_in);
  check_shape("slot_cross_attention_backward", "grad_out", grad_out_in, q_in.sizes());
  check_shape("slot_cross_attention_backward", "grad_weights", grad_weights_in,
              {q_in.size(0), q_in.size(1), k_in.size(1)});
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in), grad_out = dense_rows(grad_out_in);
  const OptionalTensor slot_mask = contiguous(slot_mask_in), grad_weights = contiguous(grad_weights_in);
  const int64_t B = q.size(0), N = q.size(1), H = q.size(2), D = q.size(3), S = k.size(1);
  Tensor grad_q = empty_result(q.sizes(), q.options());
  Tensor grad_k = at::empty(k.sizes(), k.options());
  Tensor grad_v = at::empty(v.sizes(), v.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "slot_cross_attention_backward", [&] {
    using T = Accumulate<scalar_t>;
    const int64_t size = H * S * tile_width<scalar_t>(D);
    PartialSums<T> dk(B, N, size), dv(B, N, size);
    for_each_chunk(B, N, [&](Chunk chunk, int64_t task) {
      backward_chunk<scalar_t>(grad_out, grad_weights, q, k, v, live_slots(slot_mask, chunk.image, S), scale, chunk,
                               grad_q, dk.of_task(task), dv.of_task(task));
    });
    for_each_image(B, [&](int64_t b) {
      const std::vector<int> live = live_slots(slot_mask, b, S);
      store_slots<scalar_t>(dk.total(b), live, scale, b, grad_k);
      store_slots<scalar_t>(dv.total(b), live, 1, b, grad_v);
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("slot_cross_attention", forward);
  m.impl("slot_cross_attention_backward", backward);
}

}  // namespace compgen
