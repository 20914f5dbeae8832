// slot_competition on the CPU. Slots q [B,S,H,D] compete for inputs k, v [B,N,H,D]; one step of Slot Attention:
//   a = softmax_{s,h}(scale q·k),  mass = Σ_n (a + eps),  updates = Σ_n (a + eps) v / mass,  weights = Σ_h a
// and backward, with g = du / mass:
//   da = g·(v − updates) + dw,  dl = a (da − Σ_{s,h} a da)
//   dk = scale Σ_s dl q,  dv = Σ_s (a + eps) g,  dq = scale Σ_n dl k
// Tasks, tiles and ordered sums are those of slot_cross_attention, with the roles of rows and slots kept: rows are the
// inputs, of which there are many, and slots are few.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "chunks.h"

namespace compgen {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// a [H · live slots, kStride] for the tile of `count` inputs starting at n.
template <typename Scalar>
void compete(RowTile<Scalar>& keys, const SlotPack<Scalar>& queries, int64_t b, int64_t n, int64_t H, int64_t D, int J,
             int count, Buffer<Accumulate<Scalar>>& a, Buffer<Accumulate<Scalar>>& scratch) {
  for (int64_t h = 0; h < H; ++h) {
    keys.read(b, n, h, count);
    scores(keys.data(), keys.stride(), count, D, queries.head(h), a.data() + h * J * kStride, scratch.data(),
           keys.after(h));
  }
  softmax(a.data(), H * J, count);
}

// sums: per head and live slot `width` sums of (a + eps) v, and after all of them one sum of (a + eps).
template <typename Scalar>
void forward_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<int>& live, double scale,
                   double eps, Chunk chunk, Accumulate<Scalar>* sums, Tensor& weights) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(2), D = q.size(3), b = chunk.image;
  const int J = live.size(), width = tile_width<Scalar>(D);
  SlotPack<Scalar> queries;
  queries.template fill<Scalar>(q, b, live, scale);

  RowTile<Scalar> keys(k), values(v);
  Buffer<T> a(H * J * kStride), w(J * kStride), scratch(scratch_size<T>(J));
  Buffer<Vec<T>> mass(H * J, Vec<T>{});
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    compete(keys, queries, b, n, H, D, J, count, a, scratch);
    if (weights.numel()) {
      sum_heads(a, H, w);
      store_weights<Scalar>(w.data(), live, count, T(1), b, n, weights);
    }
    for (T& x : a) x += static_cast<T>(eps);
    for (int64_t i = 0; i < H * J; ++i) mass[i] += lane_sums(a.data() + i * kStride, count);
    for (int64_t h = 0; h < H; ++h) {
      values.read(b, n, h, count);
      gather(a.data() + h * J * kStride, J, values.data(), values.stride(), count, width, sums + h * J * width,
             values.after(h));
    }
  }
  for (int64_t i = 0; i < H * J; ++i) sums[H * J * width + i] = sum<T>(mass[i]);
}

// weights: the forward's, where they are a itself (one head, not rounded); otherwise a is computed again.
template <typename Scalar>
void backward_chunk(const Tensor& g, const Tensor& shift, const OptionalTensor& grad_weights, const Tensor& q,
                    const Tensor& k, const Tensor& v, const OptionalTensor& weights, const std::vector<int>& live,
                    double scale, double eps, Chunk chunk, Tensor& grad_k, Tensor& grad_v, Accumulate<Scalar>* dq) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(2), D = q.size(3), S = q.size(1), b = chunk.image;
  const int J = live.size(), width = tile_width<Scalar>(D);
  SlotPack<Scalar> queries, grads;
  queries.template fill<Scalar>(q, b, live, scale);
  grads.template fill<T>(g, b, live, 1);
  const T* shifts = shift.const_data_ptr<T>() + b * S * H;

  RowTile<Scalar> keys(k), values(v), key_grads(grad_k), value_grads(grad_v);
  Buffer<T> a(H * J * kStride), da(H * J * kStride), dw(J * kStride), scratch(scratch_size<T>(J));
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    if (weights)
      load_weights<Scalar>(*weights, b, n, live, count, T(1), a.data());
    else
      compete(keys, queries, b, n, H, D, J, count, a, scratch);
    if (grad_weights) load_weights<Scalar>(*grad_weights, b, n, live, count, T(1), dw.data());
    for (int64_t h = 0; h < H; ++h) {
      T* da_h = da.data() + h * J * kStride;
      values.read(b, n, h, count);
      scores(values.data(), values.stride(), count, D, grads.head(h), da_h, scratch.data(), values.after(h));
      for (int j = 0; j < J; ++j) add(da_h + j * kStride, dw.data() + j * kStride, -shifts[live[j] * H + h]);
    }
    softmax_backward(a.data(), da.data(), H * J, count);
    for (T& x : a) x += static_cast<T>(eps);
    for (int64_t h = 0; h < H; ++h) {
      keys.read(b, n, h, count);
      gather(da.data() + h * J * kStride, J, keys.data(), keys.stride(), count, width, dq + h * J * width,
             keys.after(h));
      key_grads.write(b, n, h);
      mix(da.data() + h * J * kStride, count, queries.head(h), key_grads.data(), key_grads.stride(),
          key_grads.after(h, true));
      key_grads.finish(count);
      value_grads.write(b, n, h);
      mix(a.data() + h * J * kStride, count, grads.head(h), value_grads.data(), value_grads.stride(),
          value_grads.after(h, true));
      value_grads.finish(count);
    }
  }
}

// Divides an image's sums by their mass and writes both; without any mass (no inputs, masked slot) the update is 0.
template <typename Scalar>
void finish_image(Buffer<Accumulate<Scalar>> sums, const std::vector<int>& live, int64_t b, Tensor& updates,
                  Tensor& mass) {
  using T = Accumulate<Scalar>;
  const int64_t S = updates.size(1), H = updates.size(2), J = live.size(), width = tile_width<Scalar>(updates.size(3));
  T* image_mass = mass.mutable_data_ptr<T>() + b * S * H;
  std::fill(image_mass, image_mass + S * H, T(0));
  for (int64_t h = 0; h < H; ++h)
    for (int64_t j = 0; j < J; ++j) {
      const T m = sums[H * J * width + h * J + j];
      image_mass[live[j] * H + h] = m;
      for (int64_t d = 0; d < width && m > 0; ++d) sums[(h * J + j) * width + d] /= m;
    }
  store_slots<Scalar>(sums, live, 1, b, updates);
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& slot_mask) {
  const char* op = "slot_competition";
  const int64_t B = k.size(0), N = k.size(1), H = k.size(2), D = k.size(3), S = q.size(1);
  check_shape(op, "q", q, {B, S, H, D});
  check_shape(op, "k", k, {B, N, H, D});
  check_shape(op, "v", v, {B, N, H, D});
  check_shape(op, "slot_mask", slot_mask, {B, S});
}

void check_backward(const Tensor& grad_updates, const OptionalTensor& grad_weights, const Tensor& q, const Tensor& k,
                    const OptionalTensor& weights, const Tensor& updates, const Tensor& mass) {
  const char* op = "slot_competition_backward";
  const int64_t B = k.size(0), N = k.size(1), S = q.size(1);
  check_shape(op, "grad_updates", grad_updates, q.sizes());
  check_shape(op, "updates", updates, q.sizes());
  check_shape(op, "mass", mass, q.sizes().slice(0, 3));
  check_shape(op, "grad_weights", grad_weights, {B, N, S});
  check_shape(op, "weights", weights, {B, N, S});
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                           const OptionalTensor& slot_mask_in, double scale, double eps,
                                           bool return_weights) {
  check(q_in, k_in, v_in, slot_mask_in);
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const OptionalTensor slot_mask = contiguous(slot_mask_in);
  const int64_t B = k.size(0), N = k.size(1), H = k.size(2), D = k.size(3), S = q.size(1);
  const auto exact = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor updates = at::empty(q.sizes(), q.options());
  Tensor mass = at::empty({B, S, H}, q.options().dtype(exact));
  Tensor weights = return_weights ? empty_result({B, N, S}, q.options()) : at::empty({0}, q.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "slot_competition", [&] {
    PartialSums<Accumulate<scalar_t>> sums(B, N, H * S * (tile_width<scalar_t>(D) + 1));
    for_each_chunk(B, N, [&](Chunk chunk, int64_t task) {
      forward_chunk<scalar_t>(q, k, v, live_slots(slot_mask, chunk.image, S), scale, eps, chunk, sums.of_task(task),
                              weights);
    });
    for_each_image(B, [&](int64_t b) {
      finish_image<scalar_t>(sums.total(b), live_slots(slot_mask, b, S), b, updates, mass);
    });
  });
  return {updates, weights, mass};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_updates, const OptionalTensor& grad_weights_in,
                                            const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                            const OptionalTensor& slot_mask_in, const OptionalTensor& weights_in,
                                            const Tensor& updates, const Tensor& mass, double scale, double eps) {
  check(q_in, k_in, v_in, slot_mask_in);
  check_backward(grad_updates, grad_weights_in, q_in, k_in, weights_in, updates, mass);
  const Tensor q = dense_rows(q_in), k = dense_rows(k_in), v = dense_rows(v_in);
  const OptionalTensor slot_mask = contiguous(slot_mask_in), grad_weights = contiguous(grad_weights_in);
  const OptionalTensor weights = contiguous(weights_in);
  const Tensor g = (grad_updates.to(mass.scalar_type()) / mass.unsqueeze(-1)).contiguous();
  const Tensor shift = (g * updates).sum(-1);
  const int64_t B = k.size(0), N = k.size(1), H = k.size(2), D = k.size(3), S = q.size(1);
  Tensor grad_q = at::empty(q.sizes(), q.options());
  Tensor grad_k = empty_result(k.sizes(), k.options());
  Tensor grad_v = empty_result(v.sizes(), v.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "slot_competition_backward", [&] {
    PartialSums<Accumulate<scalar_t>> dq(B, N, H * S * tile_width<scalar_t>(D));
    for_each_chunk(B, N, [&](Chunk chunk, int64_t task) {
      backward_chunk<scalar_t>(g, shift, grad_weights, q, k, v, weights, live_slots(slot_mask, chunk.image, S), scale,
                               eps, chunk, grad_k, grad_v, dq.of_task(task));
    });
    for_each_image(B, [&](int64_t b) {
      store_slots<scalar_t>(dq.total(b), live_slots(slot_mask, b, S), scale, b, grad_q);
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("slot_competition", forward);
  m.impl("slot_competition_backward", backward);
}

}  // namespace compgen
