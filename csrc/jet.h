// Second-order mixed Taylor expansions x + ε_u x_u + ε_v x_v + ε_u ε_v x_uv with ε_u² = ε_v² = 0, as a number type: of
// scalars or of vectors. Kernels written on it are the ordinary formulas.
//
// So are their backward passes: the adjoint of a jet op is the ordinary adjoint in jet arithmetic, with the gradient's
// channels reversed. For ĝ = (g_uv, g_v, g_u, g), Σ_c g_c y_c is the ε_u ε_v coefficient of ĝ·y; what moves a factor
// from y to ĝ in ordinary algebra does so here.
#pragma once

#include "rows.h"

namespace compgen {

constexpr int kChannels = 4;  // x, u, v, uv: bit 0 of a channel's number says that it has ε_u, bit 1 that it has ε_v

template <typename V>
struct Jet {
  V x, u, v, uv;

  Jet reversed() const { return {uv, v, u, x}; }
};

template <typename V>
inline Jet<V> operator+(Jet<V> a, Jet<V> b) {
  return {a.x + b.x, a.u + b.u, a.v + b.v, a.uv + b.uv};
}

template <typename V>
inline Jet<V> operator-(Jet<V> a, Jet<V> b) {
  return {a.x - b.x, a.u - b.u, a.v - b.v, a.uv - b.uv};
}

template <typename V>
inline Jet<V> operator*(Jet<V> a, Jet<V> b) {
  return {a.x * b.x, a.u * b.x + a.x * b.u, a.v * b.x + a.x * b.v, a.uv * b.x + a.u * b.v + a.v * b.u + a.x * b.uv};
}

template <typename V>
inline Jet<V> operator*(Jet<V> a, V constant) {
  return {a.x * constant, a.u * constant, a.v * constant, a.uv * constant};
}

template <typename V>
inline Jet<V> square(Jet<V> a) {
  const V twice = a.x + a.x;
  return {a.x * a.x, twice * a.u, twice * a.v, twice * a.uv + (a.u + a.u) * a.v};
}

template <typename V>
inline Jet<V>& operator+=(Jet<V>& a, Jet<V> b) {
  return a = a + b;
}

// f of a jet, given f, f' and f'' at x.
template <typename V>
inline Jet<V> apply(Jet<V> a, V f, V df, V ddf) {
  return {f, df * a.u, df * a.v, df * a.uv + ddf * a.u * a.v};
}

template <typename T>
inline Jet<T> rsqrt(Jet<T> a) {
  const T r = 1 / std::sqrt(a.x), r2 = r * r;
  return apply(a, r, T(-0.5) * r * r2, T(0.75) * r * r2 * r2);
}

template <typename T>
inline Jet<Vec<T>> in_every_lane(Jet<T> a) {
  return {broadcast(a.x), broadcast(a.u), broadcast(a.v), broadcast(a.uv)};
}

template <typename T>
inline Jet<T> sum(Jet<Vec<T>> a) {
  return {sum<T>(a.x), sum<T>(a.u), sum<T>(a.v), sum<T>(a.uv)};
}

// The channels of a contiguous tensor [1, 3 or 4, …], `stride` apart; missing ones read as zero and are not written.
template <typename Scalar>
class Channels {
 public:
  using T = Accumulate<Scalar>;

  explicit Channels(const at::Tensor& stacked)
      : data_(const_cast<Scalar*>(stacked.const_data_ptr<Scalar>())), count_(stacked.size(0)),
        stride_(count_ ? stacked.numel() / count_ : 0) {}

  Vec<T> read(int channel, int64_t at, int count) const {
    return channel < count_ ? load_as<T>(data_ + channel * stride_ + at, count) : Vec<T>{};
  }

  void write(int channel, int64_t at, Vec<T> x, int count) const {
    if (channel < count_) store_as<T>(data_ + channel * stride_ + at, x, count);
  }

  Jet<Vec<T>> read(int64_t at, int count) const {
    return {read(0, at, count), read(1, at, count), read(2, at, count), read(3, at, count)};
  }

  void write(int64_t at, Jet<Vec<T>> jet, int count) const {
    write(0, at, jet.x, count), write(1, at, jet.u, count);
    write(2, at, jet.v, count), write(3, at, jet.uv, count);
  }

 private:
  Scalar* data_;
  int64_t count_, stride_;
};

// A run of up to kSize elements of a tensor of jets, in the first-level cache. The channels of a tensor are often a power
// of two apart and so fall on the same few cache lines: read and written in step, a dozen of them evict each other before
// a line is used up. Copied one channel after the other they do not meet.
template <typename Scalar>
class JetBlock {
 public:
  using T = Accumulate<Scalar>;
  static constexpr int kLanes = Simd<T>::kLanes, kVectors = 32, kSize = kVectors * kLanes;

  Jet<Vec<T>> operator[](int i) const { return {data_[0][i], data_[1][i], data_[2][i], data_[3][i]}; }
  void set(int i, Jet<Vec<T>> jet) {
    data_[0][i] = jet.x, data_[1][i] = jet.u, data_[2][i] = jet.v, data_[3][i] = jet.uv;
  }

  void read(const Channels<Scalar>& from, int64_t at, int count) {
    for (int c = 0; c < kChannels; ++c)
      for (int i = 0; i * kLanes < count; ++i) data_[c][i] = from.read(c, at + i * kLanes, count - i * kLanes);
  }

  void write(const Channels<Scalar>& to, int64_t at, int count) const {
    for (int c = 0; c < kChannels; ++c)
      for (int i = 0; i * kLanes < count; ++i) to.write(c, at + i * kLanes, data_[c][i], count - i * kLanes);
  }

 private:
  Vec<T> data_[kChannels][kVectors];
};

// The shape of a whole jet of which x holds some channels, and so of its gradient.
inline std::vector<int64_t> jet_sizes(const char* op, const at::Tensor& x) {
  TORCH_CHECK(x.dim() > 0 && x.size(0) <= kChannels, op, ": x has shape ", x.sizes(), "; expected [", kChannels,
              " or fewer channels, …]");
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] = kChannels;
  return sizes;
}

}  // namespace compgen
