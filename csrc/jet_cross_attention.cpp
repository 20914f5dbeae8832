// jet_cross_attention on the CPU: slot_cross_attention in jet arithmetic (jet.h). Slots are moved by u (side A) or by v
// (side B), so a slot has a value and one tangent t. They are packed in the order
//   t_A | A  B | t_B
// and then every product of jets is a plain product with a run of it. The channels of p·v are
//   p · [A B],   (p of A, p_u) · [t_A A B],   (p_v, p of B) · [A B t_B],   (p_v of A, p_uv, p_u of B) · [t_A A B t_B]
// since a channel with u takes in t_A, one with v takes in t_B. The same weights serve the sums over pixels, and the
// same runs the scores, with the channels of the other factor reversed. No zero known beforehand is multiplied.
//
//   s = scale q·k,   p = softmax(s),   o = Σ_s p v
// and backward, with ĝ the gradient's channels reversed and p recomputed:
//   p̂ = ĝ·v,   ŝ = p (p̂ − Σ_s p p̂),   q̂ = scale Σ_s ŝ k,   k̂ = scale Σ_n ŝ q,   v̂ = Σ_n p ĝ
// A task is a run of kChunk pixels of one image with all heads; it walks tiles of kRows pixels. Sums over pixels are
// taken per task and then added in task order: the same bits for any number of threads.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "chunks.h"
#include "jet.h"

namespace compgen {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int reversed(int channel) { return kChannels - 1 - channel; }

// The live slots of one image, as indices into the 2 S slots (values, then tangents) of a paired tensor.
struct Slots {
  std::vector<int> order;  // t_A | A B | t_B
  int A = 0, J = 0;        // how many slots are on side A, and on both

  int begin(int channel) const { return channel & 1 ? 0 : A; }
  int end(int channel) const { return channel & 2 ? 2 * J : A + J; }
  int count(int channel) const { return end(channel) - begin(channel); }

  // Where slot j and its tangent are in the order.
  int value(int j) const { return A + j; }
  int tangent(int j) const { return j < A ? j : J + j; }
};

Slots arrange(const Tensor& side, const OptionalTensor& slot_mask, int64_t b) {
  const int64_t S = side.size(1);
  const bool* on_a = side.const_data_ptr<bool>() + b * S;
  std::vector<int> A, B;
  for (const int s : live_slots(slot_mask, b, S)) (on_a[s] ? A : B).push_back(s);
  Slots slots{{}, static_cast<int>(A.size()), static_cast<int>(A.size() + B.size())};
  for (const int s : A) slots.order.push_back(s + S);
  for (const std::vector<int>& part : {A, B}) slots.order.insert(slots.order.end(), part.begin(), part.end());
  for (const int s : B) slots.order.push_back(s + S);
  return slots;
}

// [2, B, S, H, D] as [B, 2 S, H, D], and back.
Tensor paired(const Tensor& x) {
  return x.transpose(0, 1).reshape({x.size(1), 2 * x.size(2), x.size(3), x.size(4)}).contiguous();
}
Tensor unpaired(const Tensor& x) {
  return x.view({x.size(0), 2, x.size(1) / 2, x.size(2), x.size(3)}).transpose(0, 1).contiguous();
}

// The slots packed in full, and for each channel of rows that are scored against them the run that channel meets.
template <typename Scalar>
class JetSlotPack {
 public:
  using T = Accumulate<Scalar>;

  JetSlotPack(const Tensor& x, int64_t b, const Slots& slots, double factor, int channels) : slots_(slots) {
    for (int c = 0; c < channels; ++c) {
      const auto first = slots.order.begin();
      const std::vector<int> run(first + slots.begin(reversed(c)), first + slots.end(reversed(c)));
      runs_[c].template fill<Scalar>(x, b, run, factor);
    }
  }

  PackedSlots<T> scored_by(int channel, int h) const { return runs_[channel].head(h); }
  PackedSlots<T> mixed_into(int channel, int h) const {
    const PackedSlots<T> all = runs_[0].head(h);
    return {slots_.count(channel), all.width, all.rows + slots_.begin(channel) * all.width, nullptr};
  }

 private:
  const Slots& slots_;
  SlotPack<Scalar> runs_[kChannels];
};

// The rows of a tile for each channel of a tensor [C, B, N, H, D].
template <typename Scalar>
class JetTile {
 public:
  explicit JetTile(const Tensor& stacked) {
    for (int64_t c = 0; c < stacked.size(0); ++c) tensors_.push_back(stacked.select(0, c));
    tiles_.reserve(tensors_.size());
    for (const Tensor& tensor : tensors_) tiles_.emplace_back(tensor);
  }
  int channels() const { return tiles_.size(); }
  RowTile<Scalar>& operator[](int channel) { return tiles_[channel]; }
  void read(int64_t b, int64_t n, int64_t h, int count) {
    for (RowTile<Scalar>& tile : tiles_) tile.read(b, n, h, count);
  }

 private:
  std::vector<Tensor> tensors_;
  std::vector<RowTile<Scalar>> tiles_;
};

// For each channel a matrix [2 J slots in order, kStride pixels] of products or weights.
template <typename T>
class JetWeights {
 public:
  using V = Vec<T>;

  explicit JetWeights(const Slots& slots)
      : slots_(slots), data_(kChannels * 2 * slots.J * kStride), scratch_(scratch_size<T>(2 * slots.J)) {}

  const T* run(int channel) const { return at(channel, slots_.begin(channel)); }

  // Products of rows with slots, channel c of the rows in the matrix of the reversed channel.
  template <typename Scalar, typename Channel>
  void score(JetTile<Scalar>& rows, const JetSlotPack<Scalar>& slots, int h, int count, int width,
             const Channel& channel) {
    for (int c = 0; c < rows.channels(); ++c) {
      const RowTile<Scalar>& tile = rows[channel(c)];
      T* products = at(reversed(c), slots_.begin(reversed(c)));
      scores(tile.data(), tile.stride(), count, width, slots.scored_by(c, h), products, scratch_.data(), tile.after(h));
    }
  }

  // The product of jets for slot j, from the products that `score` made of rows with `channels` channels.
  Jet<V> product(int j, int r, int channels) const {
    const int value = slots_.value(j), tangent = slots_.tangent(j);
    const auto of = [&](int channel, int slot) { return load(at(reversed(channel), slot) + r); };
    Jet<V> s{of(0, value), {}, {}, {}};
    if (channels == kChannels) s = {s.x, of(1, value), of(2, value), of(3, value)};
    if (j < slots_.A) {
      s.u += of(0, tangent);
      if (channels == kChannels) s.uv += of(2, tangent);
    } else {
      s.v += of(0, tangent);
      if (channels == kChannels) s.uv += of(1, tangent);
    }
    return s;
  }

  Jet<V> get(int j, int r) const {
    const int value = slots_.value(j);
    return {load(at(0, value) + r), load(at(1, value) + r), load(at(2, value) + r), load(at(3, value) + r)};
  }

  void set(int j, int r, Jet<V> p) {
    const int value = slots_.value(j);
    store(at(0, value) + r, p.x), store(at(1, value) + r, p.u);
    store(at(2, value) + r, p.v), store(at(3, value) + r, p.uv);
  }

  // Also weighs the slot's tangent, as the order's comment at the top of this file says.
  void set_with_tangent(int j, int r, Jet<V> p) {
    const int tangent = slots_.tangent(j);
    set(j, r, p);
    store(at(j < slots_.A ? 1 : 2, tangent) + r, p.x);
    store(at(3, tangent) + r, j < slots_.A ? p.v : p.u);
  }

  // From products to p = softmax of jets over the slots.
  void softmax(int count, int channels) {
    for (int r = 0; r < count; r += Simd<T>::kLanes) {
      V most = broadcast(-std::numeric_limits<T>::infinity());
      for (int j = 0; j < slots_.J; ++j) {
        const Jet<V> s = product(j, r, channels);
        set(j, r, s);
        most = maximum<T>(most, s.x);
      }
      V mass{}, mass_u{}, mass_v{};
      for (int j = 0; j < slots_.J; ++j) {
        Jet<V> s = get(j, r);
        s.x = exp_nonpositive(s.x - most);
        store(at(0, slots_.value(j)) + r, s.x);
        mass += s.x, mass_u += s.x * s.u, mass_v += s.x * s.v;
      }
      const V inverse = T(1) / mass, mean_u = mass_u * inverse, mean_v = mass_v * inverse;
      V mean_uv{};
      for (int j = 0; j < slots_.J; ++j) {
        const Jet<V> s = get(j, r);
        const Jet<V> l{s.x * inverse, s.u - mean_u, s.v - mean_v, s.uv};
        set(j, r, l);
        mean_uv += l.x * (l.uv + l.u * l.v);
      }
      for (int j = 0; j < slots_.J; ++j) {
        const Jet<V> l = get(j, r);
        set_with_tangent(j, r, Jet<V>{T(1) - V{}, l.u, l.v, l.uv + l.u * l.v - mean_uv} * l.x);
      }
    }
  }

  // From products p̂ to ŝ = p (p̂ − Σ_s p p̂).
  void softmax_backward(const JetWeights& p, int count) {
    for (int r = 0; r < count; r += Simd<T>::kLanes) {
      Jet<V> mean{};
      for (int j = 0; j < slots_.J; ++j) {
        const Jet<V> g = product(j, r, kChannels);
        set(j, r, g);
        mean += p.get(j, r) * g;
      }
      for (int j = 0; j < slots_.J; ++j) set_with_tangent(j, r, p.get(j, r) * (get(j, r) - mean));
    }
  }

 private:
  T* at(int channel, int slot) { return data_.data() + (channel * 2 * slots_.J + slot) * kStride; }
  const T* at(int channel, int slot) const { return data_.data() + (channel * 2 * slots_.J + slot) * kStride; }

  const Slots& slots_;
  Buffer<T> data_, scratch_;
};

template <typename Scalar>
void forward_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Slots& slots, double scale, Chunk chunk,
                   Tensor& out) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(3), D = q.size(4), b = chunk.image;
  JetTile<Scalar> queries(q), outputs(out);
  const JetSlotPack<Scalar> keys(k, b, slots, scale, queries.channels()), values(v, b, slots, 1, 1);
  JetWeights<T> p(slots);
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    for (int64_t h = 0; h < H; ++h) {
      queries.read(b, n, h, count);
      if (slots.J) p.score(queries, keys, h, count, D, [](int c) { return c; });
      p.softmax(count, queries.channels());
      for (int c = 0; c < kChannels; ++c) {
        RowTile<Scalar>& output = outputs[c];
        output.write(b, n, h);
        mix(p.run(c), count, values.mixed_into(c, h), output.data(), output.stride(), output.after(h, true));
        output.finish(count);
      }
    }
  }
}

template <typename Scalar>
void backward_chunk(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Slots& slots,
                    double scale, Chunk chunk, Tensor& grad_q, Accumulate<Scalar>* dk, Accumulate<Scalar>* dv) {
  using T = Accumulate<Scalar>;
  const int64_t H = q.size(3), D = q.size(4), b = chunk.image;
  const int width = tile_width<Scalar>(D);
  JetTile<Scalar> queries(q), grads(grad), query_grads(grad_q);
  const JetSlotPack<Scalar> keys(k, b, slots, scale, queries.channels()), values(v, b, slots, 1, kChannels);
  JetWeights<T> p(slots), ds(slots);
  const auto sums = [&](T* of, int channel, int64_t h) {
    return of + (h * 2 * slots.J + slots.begin(channel)) * width;
  };
  for (int64_t n = chunk.begin; n < chunk.end; n += kRows) {
    const int count = std::min<int64_t>(kRows, chunk.end - n);
    for (int64_t h = 0; h < H; ++h) {
      queries.read(b, n, h, count);
      grads.read(b, n, h, count);
      if (slots.J) {
        p.score(queries, keys, h, count, D, [](int c) { return c; });
        ds.score(grads, values, h, count, D, reversed);
      }
      p.softmax(count, queries.channels());
      ds.softmax_backward(p, count);
      for (int c = 0; c < queries.channels(); ++c) {
        const int of = reversed(c);  // q̂ is the gradient's channels reversed, and the channel whose weights meet q's
        RowTile<Scalar>&query_grad = query_grads[c], &query = queries[c];
        query_grad.write(b, n, h);
        mix(ds.run(of), count, keys.mixed_into(of, h), query_grad.data(), query_grad.stride(),
            query_grad.after(h, true));
        query_grad.finish(count);
        if (slots.J) gather(ds.run(of), slots.count(of), query.data(), query.stride(), count, width, sums(dk, of, h));
      }
      for (int c = 0; c < kChannels && slots.J; ++c)
        gather(p.run(c), slots.count(c), grads[c].data(), grads[c].stride(), count, width, sums(dv, c, h));
    }
  }
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& side, const OptionalTensor& slot_mask) {
  const char* op = "jet_cross_attention";
  const int64_t C = q.size(0), B = q.size(1), N = q.size(2), H = q.size(3), D = q.size(4), S = side.size(1);
  TORCH_CHECK(C == 1 || C == kChannels, op, ": q has shape ", q.sizes(), "; expected [1 or 4, B, N, H, D]");
  check_shape(op, "q", q, {C, B, N, H, D});
  check_shape(op, "k", k, {2, B, S, H, D});
  check_shape(op, "v", v, {2, B, S, H, D});
  check_shape(op, "side", side, {B, S});
  check_shape(op, "slot_mask", slot_mask, {B, S});
}

Tensor forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& side_in,
               const OptionalTensor& slot_mask_in, double scale) {
  check(q_in, k_in, v_in, side_in, slot_mask_in);
  const Tensor q = dense_rows(q_in), k = paired(k_in), v = paired(v_in), side = side_in.contiguous();
  const OptionalTensor slot_mask = contiguous(slot_mask_in);
  Tensor out = empty_result(jet_sizes("jet_cross_attention", q), q.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "jet_cross_attention", [&] {
    for_each_chunk(q.size(1), q.size(2), [&](Chunk chunk, int64_t) {
      forward_chunk<scalar_t>(q, k, v, arrange(side, slot_mask, chunk.image), scale, chunk, out);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_in, const Tensor& q_in, const Tensor& k_in,
                                            const Tensor& v_in, const Tensor& side_in,
                                            const OptionalTensor& slot_mask_in, double scale) {
  check(q_in, k_in, v_in, side_in, slot_mask_in);
  check_shape("jet_cross_attention_backward", "grad", grad_in, jet_sizes("jet_cross_attention_backward", q_in));
  const Tensor grad = dense_rows(grad_in), q = dense_rows(q_in), k = paired(k_in), v = paired(v_in);
  const Tensor side = side_in.contiguous();
  const OptionalTensor slot_mask = contiguous(slot_mask_in);
  const int64_t B = q.size(1), N = q.size(2);
  Tensor grad_q = empty_result(q.sizes(), q.options()), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "jet_cross_attention_backward", [&] {
    using T = Accumulate<scalar_t>;
    const int64_t size = k.size(1) * k.size(2) * tile_width<scalar_t>(k.size(3));
    PartialSums<T> dk(B, N, size), dv(B, N, size);
    for_each_chunk(B, N, [&](Chunk chunk, int64_t task) {
      backward_chunk<scalar_t>(grad, q, k, v, arrange(side, slot_mask, chunk.image), scale, chunk, grad_q,
                               dk.of_task(task), dv.of_task(task));
    });
    for_each_image(B, [&](int64_t b) {
      const std::vector<int> order = arrange(side, slot_mask, b).order;
      store_slots<scalar_t>(dk.total(b), order, scale, b, grad_k);
      store_slots<scalar_t>(dv.total(b), order, 1, b, grad_v);
    });
  });
  return {grad_q, unpaired(grad_k), unpaired(grad_v)};
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("jet_cross_attention", forward);
  m.impl("jet_cross_attention_backward", backward);
}

}  // namespace compgen
