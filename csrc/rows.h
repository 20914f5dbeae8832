// Rows of a user's tensor as the tile algebra wants them: contiguous along the head width, in the accumulation type, at
// least one vector wide. Float and double rows that already are so are used in place; half precision and very narrow
// heads go through a small buffer that stays in the first-level cache.
#pragma once

#include <vector>

#include "convert.h"
#include "memory.h"
#include "slot_tile.h"

namespace compgen {

template <typename Scalar>
using Accumulate = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

// The width at which rows of `width` scalars enter the tile algebra.
template <typename Scalar>
inline int tile_width(int64_t width) {
  constexpr int L = Simd<Accumulate<Scalar>>::kLanes;
  const bool in_place = std::is_same_v<Scalar, Accumulate<Scalar>> && width >= L;
  return in_place ? width : round_up(width, L);
}

// One head's rows of a tile of a [B, N, H, D] tensor with dense rows.
template <typename Scalar>
class RowTile {
 public:
  using T = Accumulate<Scalar>;

  explicit RowTile(const at::Tensor& tensor)
      : tensor_(tensor), width_(tensor.size(3)), tile_width_(tile_width<Scalar>(width_)) {
    if (staged()) buffer_.resize(kRows * tile_width_);
  }

  // Makes rows [n, n + count) of image b and head h readable at data().
  void read(int64_t b, int64_t n, int64_t h, int count) {
    place(tensor_.const_data_ptr<Scalar>() + offset(b, n, h));
    if (!staged()) return;
    for (int r = 0; r < count; ++r) copy_row<T>(rows_ + r * tensor_.stride(1), width_, data_ + r * stride_);
  }

  // Makes data() the place to write rows [n, n + count) of image b and head h to; `finish` completes the write.
  void write(int64_t b, int64_t n, int64_t h) { place(tensor_.const_data_ptr<Scalar>() + offset(b, n, h)); }

  void finish(int count) {
    if (!staged()) return;
    Scalar* rows = const_cast<Scalar*>(rows_);
    for (int r = 0; r < count; ++r) copy_row<T>(data_ + r * stride_, width_, rows + r * tensor_.stride(1));
  }

  T* data() const { return data_; }
  int64_t stride() const { return stride_; }

  // The rows that come after those of head h: the next head's, or after the last head the next tile's.
  Prefetch after(int64_t h, bool to_write = false) const {
    const int64_t stride = tensor_.stride(1), head = tensor_.stride(2);
    const int64_t ahead = h + 1 < tensor_.size(2) ? head : kRows * stride - h * head;
    constexpr int64_t kBytes = sizeof(Scalar);
    return {rows_ + ahead, stride * kBytes, kRows, static_cast<int>(width_ * kBytes), to_write};
  }

 private:
  bool staged() const { return !std::is_same_v<Scalar, T> || tile_width_ != width_; }
  int64_t offset(int64_t b, int64_t n, int64_t h) const {
    return b * tensor_.stride(0) + n * tensor_.stride(1) + h * tensor_.stride(2);
  }
  void place(const Scalar* rows) {
    rows_ = rows;
    data_ = buffer_.data();
    stride_ = tile_width_;
    if constexpr (std::is_same_v<Scalar, T>) {
      if (staged()) return;
      data_ = const_cast<T*>(rows);
      stride_ = tensor_.stride(1);
    }
  }

  const at::Tensor& tensor_;
  int width_, tile_width_;
  Buffer<T> buffer_;  // zero beyond width_ of each row, and stays so
  const Scalar* rows_ = nullptr;
  T* data_ = nullptr;
  int64_t stride_ = 0;
};

// The live slots of one image, for all heads, packed for the tile algebra. A masked slot is left out here, so no kernel
// below ever meets it: it can get no weight and no gradient, whatever it holds.
template <typename Scalar>
class SlotPack {
 public:
  using T = Accumulate<Scalar>;

  // slots: [B, S, H, D] with dense rows; packs image b's, every value multiplied by `factor`.
  template <typename Source>
  void fill(const at::Tensor& slots, int64_t b, const std::vector<int>& live, T factor) {
    const Source* image = slots.const_data_ptr<Source>() + b * slots.stride(0);
    const int64_t slot_stride = slots.stride(1), head_stride = slots.stride(2);
    const int heads = slots.size(2), width = slots.size(3);
    count_ = live.size();
    width_ = tile_width<Scalar>(width);
    padded_ = round_up(count_, Simd<T>::kLanes);
    rows_.assign(static_cast<size_t>(heads) * count_ * width_, T(0));
    columns_.assign(static_cast<size_t>(heads) * width_ * padded_, T(0));
    for (int h = 0; h < heads; ++h)
      for (int j = 0; j < count_; ++j)
        for (int d = 0; d < width; ++d) {
          const T x = static_cast<T>(image[live[j] * slot_stride + h * head_stride + d]) * factor;
          rows_[(static_cast<size_t>(h) * count_ + j) * width_ + d] = x;
          columns_[(static_cast<size_t>(h) * width_ + d) * padded_ + j] = x;
        }
  }

  PackedSlots<T> head(int h) const {
    return {count_, width_, rows_.data() + static_cast<size_t>(h) * count_ * width_,
            columns_.data() + static_cast<size_t>(h) * width_ * padded_};
  }

 private:
  int count_ = 0, width_ = 0, padded_ = 0;
  Buffer<T> rows_, columns_;
};

// Indices of the slots of image b that take part.
inline std::vector<int> live_slots(const std::optional<at::Tensor>& slot_mask, int64_t b, int64_t slots) {
  std::vector<int> live;
  const bool* mask = slot_mask ? slot_mask->const_data_ptr<bool>() + b * slots : nullptr;
  for (int64_t s = 0; s < slots; ++s)
    if (!mask || mask[s]) live.push_back(s);
  return live;
}

inline std::optional<at::Tensor> contiguous(const std::optional<at::Tensor>& x) {
  return x ? std::optional(x->contiguous()) : std::nullopt;
}

// What the loops trust, for callers of the raw op.
inline void check_shape(const char* op, const char* name, const at::Tensor& x, at::IntArrayRef expected) {
  TORCH_CHECK(x.sizes() == expected, op, ": ", name, " has shape ", x.sizes(), "; expected ", expected);
}
inline void check_shape(const char* op, const char* name, const std::optional<at::Tensor>& x,
                        at::IntArrayRef expected) {
  if (x) check_shape(op, name, *x, expected);
}

inline at::Tensor dense_rows(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace compgen
