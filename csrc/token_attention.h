// Self-attention of the tokens of one image, a head and a tile of queries at a time. Weights are kept key by key,
// [keys, kStride], so that a softmax over keys is plain vertical arithmetic on rows of lanes, and all five products are
// the small one of slot_tile.h with different strides. With q already divided by the root of the head's width:
//   w[j, i] = softmax over j of k_j · q_i          out_i = Σ_j w[j, i] v_j
// and backward, with g the gradient of out and d[j, i] = w[j, i] (v_j · g_i − Σ_l w[l, i] v_l · g_i):
//   dq_i = Σ_j d[j, i] k_j      dk_j = Σ_i d[j, i] q_i      dv_j = Σ_i w[j, i] g_i
#pragma once

#include <limits>

#include "convert.h"
#include "gelu.h"
#include "slot_tile.h"

namespace compgen {

template <typename T>
class TokenAttention {
 public:
  TokenAttention(int64_t tokens, int64_t width, int64_t heads, bool causal)
      : tokens_(tokens), width_(width), heads_(heads), head_(width / heads), padded_(round_up(head_, L)), causal_(causal),
        columns_(round_up(tokens, L)), scale_(1 / std::sqrt(static_cast<T>(head_))) {
    for (Buffer<T>* rows : {&q_, &k_, &v_, &g_, &dk_, &dv_}) rows->assign(columns_ * padded_, T(0));
    across_.resize(padded_ * columns_);
    for (Buffer<T>* tile : {&weights_, &slopes_}) tile->resize(tokens * kStride);
    out_.resize(kRows * padded_);
  }

  // out [T, W] of q, k and v side by side [T, 3W] and what is added to each row of them, [3W].
  void forward(const T* qkv, const T* bias, T* out) {
    for (int h = 0; h < heads_; ++h) {
      take(qkv, bias, h);
      turn(q_);
      for_each_tile([&](int first, int count) {
        weigh(first, count);
        multiply<T, false>(count, padded_, tokens_, weights_.data(), 1, kStride, v_.data(), padded_, out_.data(), padded_);
        give(first, count, 1, out + h * head_, width_);
      });
    }
  }

  // The gradient of q, k and v [T, 3W], of out's [T, W].
  void backward(const T* qkv, const T* bias, const T* grad, T* grad_qkv) {
    for (int h = 0; h < heads_; ++h) {
      take(qkv, bias, h);
      for (int t = 0; t < tokens_; ++t) copy_row<T>(grad + t * width_ + h * head_, head_, &g_[t * padded_]);
      std::fill(dk_.begin(), dk_.end(), T(0));
      std::fill(dv_.begin(), dv_.end(), T(0));
      T* to = grad_qkv + h * head_;
      for_each_tile([&](int first, int count) {
        turn(q_);
        weigh(first, count);
        turn(g_);
        differ(first, count);
        multiply<T, false>(count, padded_, tokens_, slopes_.data(), 1, kStride, k_.data(), padded_, out_.data(), padded_);
        give(first, count, scale_, to, 3 * width_);
        multiply<T, true>(tokens_, padded_, count, slopes_.data(), kStride, 1, &q_[first * padded_], padded_, dk_.data(),
                          padded_);
        multiply<T, true>(tokens_, padded_, count, weights_.data(), kStride, 1, &g_[first * padded_], padded_, dv_.data(),
                          padded_);
      });
      for (int t = 0; t < tokens_; ++t) {
        copy_row<T>(&dk_[t * padded_], head_, to + t * 3 * width_ + width_);
        copy_row<T>(&dv_[t * padded_], head_, to + t * 3 * width_ + 2 * width_);
      }
    }
  }

 private:
  static constexpr int L = Simd<T>::kLanes;

  template <typename Work>
  void for_each_tile(const Work& work) {
    for (int first = 0; first < tokens_; first += kRows) work(first, std::min<int>(kRows, tokens_ - first));
  }

  // Head h of q, k and v, with the bias, as dense rows.
  void take(const T* qkv, const T* bias, int h) {
    T* const rows[] = {q_.data(), k_.data(), v_.data()};
    for (int part = 0; part < 3; ++part)
      for (int d = 0; d < head_; d += L) {
        const int from = part * width_ + h * head_ + d, count = head_ - d;
        const Vec<T> added = load_as<T>(bias + from, count), factor = broadcast(part == 0 ? scale_ : T(1));
        for (int t = 0; t < tokens_; ++t)
          store(rows[part] + t * padded_ + d, (load_as<T>(qkv + t * 3 * width_ + from, count) + added) * factor);
      }
  }

  // across [width, tokens] from rows [tokens, width], by squares.
  void turn(const Buffer<T>& rows) {
    for (int t = 0; t < columns_; t += L)
      for (int d = 0; d < padded_; d += L) {
        Vec<T> square[L];
        for (int i = 0; i < L; ++i) square[i] = load(&rows[(t + i) * padded_ + d]);
        transpose<T>(square);
        for (int i = 0; i < L; ++i) store(&across_[(d + i) * columns_ + t], square[i]);
      }
  }

  // tile [keys, queries] = rows of keys times what was turned.
  void score(const Buffer<T>& keys, int first, int count, Buffer<T>& tile) {
    multiply<T, false>(tokens_, round_up(count, L), padded_, keys.data(), padded_, 1, &across_[first], columns_, tile.data(),
                       kStride);
  }

  // The weights of a tile of queries; q was turned.
  void weigh(int first, int count) {
    score(k_, first, count, weights_);
    for (int i = 0; i < count; i += L) {
      T* const column = weights_.data() + i;
      if (causal_) hide_later(first + i, column);
      Vec<T> most = load(column), total{};
      for (int j = 1; j < tokens_; ++j) most = maximum<T>(most, load(column + j * kStride));
      for (int j = 0; j < tokens_; ++j) {
        const Vec<T> e = decay(load(column + j * kStride) - most);
        store(column + j * kStride, e);
        total += e;
      }
      const Vec<T> inverse = 1 / total;
      for (int j = 0; j < tokens_; ++j) store(column + j * kStride, load(column + j * kStride) * inverse);
    }
  }

  // A query sees no key that comes after it.
  void hide_later(int first, T* column) {
    Vec<T> query;
    for (int lane = 0; lane < L; ++lane) query[lane] = first + lane;
    const Vec<T> never = broadcast(-std::numeric_limits<T>::infinity());
    for (int j = first + 1; j < tokens_; ++j) {
      T* const score = column + j * kStride;
      store(score, query >= static_cast<T>(j) ? load(score) : never);
    }
  }

  // The slopes d of a tile of queries, whose weights are there; g was turned.
  void differ(int first, int count) {
    score(v_, first, count, slopes_);
    for (int i = 0; i < count; i += L) {
      const T* const weight = weights_.data() + i;
      T* const slope = slopes_.data() + i;
      Vec<T> mean{};
      for (int j = 0; j < tokens_; ++j) mean += load(weight + j * kStride) * load(slope + j * kStride);
      for (int j = 0; j < tokens_; ++j)
        store(slope + j * kStride, load(weight + j * kStride) * (load(slope + j * kStride) - mean));
    }
  }

  // The tile's rows of out to where they belong.
  void give(int first, int count, T factor, T* to, int64_t stride) {
    for (int r = 0; r < count; ++r)
      for (int d = 0; d < head_; d += L)
        store_as<T>(to + (first + r) * stride + d, load(&out_[r * padded_ + d]) * factor, head_ - d);
  }

  int64_t tokens_, width_, heads_, head_, padded_;
  bool causal_;
  int64_t columns_;
  T scale_;
  Buffer<T> q_, k_, v_, g_, dk_, dv_;  // [columns, padded], zero beyond tokens and head
  Buffer<T> across_;                   // [padded, columns]
  Buffer<T> weights_, slopes_, out_;
};

}  // namespace compgen
