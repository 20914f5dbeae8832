// jet_slot_softmax on the CPU: the softmax over slots in jet arithmetic (jet.h), pixels in lanes. The blocks of a tensor
// [7 or 2, B, H, S, N] are a value's channels x, u, v, uv (or x alone), then what belongs to the slots' tangents, which lie
// along u where a slot is on its side and along v elsewhere. A task is a run of kRun pixels of one image and head; its jets,
// [slots, 4 channels, kRun], stay in the cache while a few sweeps go over them.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "jet.h"

namespace compgen {
namespace {

using at::Tensor;

constexpr int kRun = 128;
constexpr int kMoved = 7;  // blocks where slots move the pixels; where they do not there are two

// e^x for x <= 0 that ends at zero, so that a slot that takes no part has no weight.
template <typename V>
inline V decay(V x) {
  return x < -87 ? V{} : exp_nonpositive(x);
}

// A run of pixels of one image and head.
struct Run {
  int64_t image, head, begin;
  int count;
};

template <typename Work>
void for_each_run(int64_t images, int64_t heads, int64_t pixels, const Work& work) {
  const int64_t runs = (pixels + kRun - 1) / kRun;
  at::parallel_for(0, images * heads * runs, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % runs * kRun, group = task / runs;
      work(Run{group / heads, group % heads, begin, static_cast<int>(std::min<int64_t>(kRun, pixels - begin))});
    }
  });
}

// The rows of pixels of a contiguous tensor [blocks, B, H, S, N].
template <typename Scalar>
class Blocks {
 public:
  using T = Accumulate<Scalar>;
  using V = Vec<T>;

  explicit Blocks(const Tensor& tensor)
      : data_(const_cast<Scalar*>(tensor.const_data_ptr<Scalar>())), count_(tensor.size(0)), B_(tensor.size(1)),
        H_(tensor.size(2)), S_(tensor.size(3)), N_(tensor.size(4)) {}

  bool moved() const { return count_ == kMoved; }
  V read(int block, const Run& run, int slot, int r) const { return load_as<T>(row(block, run, slot) + r, run.count - r); }
  void write(int block, const Run& run, int slot, int r, V x) const {
    store_as<T>(row(block, run, slot) + r, x, run.count - r);
  }

 private:
  Scalar* row(int64_t block, const Run& run, int slot) const {
    return data_ + (((block * B_ + run.image) * H_ + run.head) * S_ + slot) * N_ + run.begin;
  }

  Scalar* data_;
  int64_t count_, B_, H_, S_, N_;
};

// The jets of a run in the accumulation type.
template <typename T>
class Jets {
 public:
  using V = Vec<T>;

  explicit Jets(int slots) : slots_(slots), data_(static_cast<size_t>(slots) * kChannels * kRun) {}

  Jet<V> get(int slot, int r) const {
    const T* from = data_.data() + slot * kChannels * kRun + r;
    return {load(from), load(from + kRun), load(from + 2 * kRun), load(from + 3 * kRun)};
  }
  void set(int slot, int r, Jet<V> jet) {
    T* to = data_.data() + slot * kChannels * kRun + r;
    store(to, jet.x), store(to + kRun, jet.u), store(to + 2 * kRun, jet.v), store(to + 3 * kRun, jet.uv);
  }

  // From the jets of the scores to p.
  void softmax(int r) {
    V most = broadcast(-std::numeric_limits<T>::infinity());
    for (int j = 0; j < slots_; ++j) most = maximum<T>(most, get(j, r).x);
    V mass{}, mass_u{}, mass_v{};
    for (int j = 0; j < slots_; ++j) {
      Jet<V> s = get(j, r);
      s.x = decay(s.x - most);
      set(j, r, s);
      mass += s.x, mass_u += s.x * s.u, mass_v += s.x * s.v;
    }
    const V inverse = T(1) / mass, mean_u = mass_u * inverse, mean_v = mass_v * inverse;
    V mean_uv{};
    for (int j = 0; j < slots_; ++j) {
      const Jet<V> s = get(j, r), l{s.x * inverse, s.u - mean_u, s.v - mean_v, {}};
      const V bent = s.uv + l.u * l.v;
      set(j, r, {l.x, l.u, l.v, bent});
      mean_uv += l.x * bent;
    }
    for (int j = 0; j < slots_; ++j) {
      const Jet<V> l = get(j, r);
      set(j, r, {l.x, l.x * l.u, l.x * l.v, l.x * (l.uv - mean_uv)});
    }
  }

 private:
  int slots_;
  Buffer<T> data_;
};

// Products with a jet of slots from the products with its values and tangents, x and tangent being those of channel x.
template <typename V>
inline Jet<V> together(Jet<V> by_value, V tangent, V tangent_u, V tangent_v, bool along_u) {
  (along_u ? by_value.u : by_value.v) += tangent;
  by_value.uv += along_u ? tangent_v : tangent_u;
  return by_value;
}

template <typename Scalar>
void forward_run(const Blocks<Scalar>& products, const Tensor& offsets, const Tensor& side, const Run& run,
                 const Blocks<Scalar>& weights) {
  using T = Accumulate<Scalar>;
  using V = Vec<T>;
  constexpr int L = Simd<T>::kLanes;
  const int64_t B = offsets.size(1), H = offsets.size(2), S = offsets.size(3);
  const Scalar* c = offsets.const_data_ptr<Scalar>() + (run.image * H + run.head) * S;
  const Scalar* c_t = c + B * H * S;
  const bool* along_u = side.const_data_ptr<bool>() + run.image * S;
  Jets<T> jets(S);
  for (int j = 0; j < S; ++j) {
    const V offset = broadcast(static_cast<T>(c[j])), offset_t = broadcast(static_cast<T>(c_t[j]));
    const auto read = [&](int block, int r) { return products.read(block, run, j, r); };
    for (int r = 0; r < run.count; r += L) {
      Jet<V> s{read(0, r) + offset, {}, {}, {}};
      if (products.moved()) {
        s.u = read(1, r), s.v = read(2, r), s.uv = read(3, r);
        s = together(s, read(4, r) + offset_t, read(5, r), read(6, r), along_u[j]);
      } else {
        s = together(s, read(1, r) + offset_t, V{}, V{}, along_u[j]);
      }
      jets.set(j, r, s);
    }
  }
  for (int r = 0; r < run.count; r += L) jets.softmax(r);
  for (int j = 0; j < S; ++j) {
    const auto write = [&](int block, int r, V x) { weights.write(block, run, j, r, x); };
    for (int r = 0; r < run.count; r += L) {
      const Jet<V> p = jets.get(j, r);
      write(0, r, p.x), write(1, r, p.u), write(2, r, p.v), write(3, r, p.uv);
      write(4, r, along_u[j] ? p.x : V{}), write(5, r, along_u[j] ? V{} : p.x), write(6, r, along_u[j] ? p.v : p.u);
    }
  }
}

// ŝ = p (p̂ − Σ_s p p̂): everything that has to do with the gradient is read and written with its channels reversed.
template <typename Scalar>
void backward_run(const Blocks<Scalar>& grad, const Blocks<Scalar>& weights, const Tensor& side, const Run& run,
                  const Blocks<Scalar>& grad_products) {
  using T = Accumulate<Scalar>;
  using V = Vec<T>;
  constexpr int L = Simd<T>::kLanes;
  const int S = side.size(1);
  const bool* along_u = side.const_data_ptr<bool>() + run.image * S;
  Jets<T> p(S), g(S);
  for (int j = 0; j < S; ++j) {
    const auto p_of = [&](int block, int r) { return weights.read(block, run, j, r); };
    const auto g_of = [&](int block, int r) { return grad.read(block, run, j, r); };
    for (int r = 0; r < run.count; r += L) {
      p.set(j, r, {p_of(0, r), p_of(1, r), p_of(2, r), p_of(3, r)});
      const Jet<V> by_value{g_of(3, r), g_of(2, r), g_of(1, r), g_of(0, r)};
      g.set(j, r, together(by_value, g_of(6, r), g_of(5, r), g_of(4, r), along_u[j]));
    }
  }
  for (int r = 0; r < run.count; r += L) {
    Jet<V> mean{};
    for (int j = 0; j < S; ++j) mean += p.get(j, r) * g.get(j, r);
    for (int j = 0; j < S; ++j) g.set(j, r, p.get(j, r) * (g.get(j, r) - mean));
  }
  for (int j = 0; j < S; ++j) {
    const auto write = [&](int block, int r, V x) { grad_products.write(block, run, j, r, x); };
    for (int r = 0; r < run.count; r += L) {
      const Jet<V> s = g.get(j, r);
      const V tangent = along_u[j] ? s.v : s.u;
      write(0, r, s.uv);
      if (grad_products.moved()) {
        write(1, r, s.v), write(2, r, s.u), write(3, r, s.x);
        write(4, r, tangent), write(5, r, along_u[j] ? V{} : s.x), write(6, r, along_u[j] ? s.x : V{});
      } else {
        write(1, r, tangent);
      }
    }
  }
}

Tensor blocks_like(const Tensor& x, int64_t blocks) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = blocks;
  return empty_result(sizes, x.options());
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& blocks, const Tensor& side) {
  TORCH_CHECK(blocks.dim() == 5 && side.scalar_type() == at::kBool && side.dim() == 2 &&
                  side.size(0) == blocks.size(1) && side.size(1) == blocks.size(3),
              "jet_slot_softmax: blocks of shape ", blocks.sizes(), " and a side of shape ", side.sizes(),
              "; expected [7 or 2, B, H, S, N] and bool [B, S]");
}

Tensor forward(const Tensor& products_in, const Tensor& offsets_in, const Tensor& side_in) {
  check(products_in, side_in);
  const auto sizes = products_in.sizes();
  TORCH_CHECK((sizes[0] == 2 || sizes[0] == kMoved) && offsets_in.scalar_type() == products_in.scalar_type() &&
                  offsets_in.sizes() == at::IntArrayRef({2, sizes[1], sizes[2], sizes[3]}),
              "jet_slot_softmax: products of shape ", sizes, " and offsets of shape ", offsets_in.sizes(),
              "; expected [7 or 2, B, H, S, N] and [2, B, H, S] of one dtype");
  const Tensor products = products_in.contiguous(), offsets = offsets_in.contiguous(), side = side_in.contiguous();
  Tensor weights = blocks_like(products, kMoved);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, products.scalar_type(), "jet_slot_softmax", [&] {
    const Blocks<scalar_t> from(products), to(weights);
    for_each_run(products.size(1), products.size(2), products.size(4),
                 [&](const Run& run) { forward_run<scalar_t>(from, offsets, side, run, to); });
  });
  return weights;
}

Tensor backward(const Tensor& grad_in, const Tensor& weights_in, const Tensor& side_in, int64_t blocks) {
  check(grad_in, side_in);
  TORCH_CHECK(grad_in.size(0) == kMoved && weights_in.sizes() == grad_in.sizes() && (blocks == 2 || blocks == kMoved) &&
                  weights_in.scalar_type() == grad_in.scalar_type(),
              "jet_slot_softmax_backward: grad of shape ", grad_in.sizes(), " and weights of shape ",
              weights_in.sizes(), "; expected [7, B, H, S, N] of one dtype, for 7 or 2 blocks");
  const Tensor grad = grad_in.contiguous(), weights = weights_in.contiguous(), side = side_in.contiguous();
  Tensor grad_products = blocks_like(grad, blocks);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "jet_slot_softmax_backward", [&] {
    const Blocks<scalar_t> from(grad), p(weights), to(grad_products);
    for_each_run(grad.size(1), grad.size(2), grad.size(4),
                 [&](const Run& run) { backward_run<scalar_t>(from, p, side, run, to); });
  });
  return grad_products;
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) {
  m.impl("jet_slot_softmax", forward);
  m.impl("jet_slot_softmax_backward", backward);
}

}  // namespace compgen
