// Work shared out so that its result does not depend on who does it: fixed runs of pixels, one partial sum for each, and
// the partial sums added in order.
#pragma once

#include <ATen/Parallel.h>

#include "rows.h"

namespace compgen {

constexpr int64_t kChunk = 20 * kRows;  // pixels in a task: long enough that packing the slots costs a percent

struct Chunk {
  int64_t image, begin, end;
};

inline int64_t chunks_per_image(int64_t pixels) { return (pixels + kChunk - 1) / kChunk; }

// Calls work(chunk, task) for every run of pixels of every image, in parallel.
template <typename Work>
void for_each_chunk(int64_t images, int64_t pixels, const Work& work) {
  const int64_t per_image = chunks_per_image(pixels);
  at::parallel_for(0, images * per_image, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % per_image * kChunk;
      work(Chunk{task / per_image, begin, std::min(begin + kChunk, pixels)}, task);
    }
  });
}

// `size` sums for each task, and their total over an image's tasks, always added in the same order.
template <typename T>
class PartialSums {
 public:
  PartialSums(int64_t images, int64_t pixels, int64_t size)
      : size_(size), per_image_(chunks_per_image(pixels)),
        sums_(at::zeros({images * per_image_, size}, at::CppTypeToScalarType<T>::value)) {}

  T* of_task(int64_t task) { return sums_.template mutable_data_ptr<T>() + task * size_; }

  Buffer<T> total(int64_t image) {
    Buffer<T> total(size_, T(0));
    for (int64_t task = image * per_image_; task < (image + 1) * per_image_; ++task) {
      const T* sums = of_task(task);
      for (int64_t i = 0; i < size_; ++i) total[i] += sums[i];
    }
    return total;
  }

 private:
  int64_t size_, per_image_;
  at::Tensor sums_;
};

// Writes totals [H, live slots, width] of image b to out [B, S, H, D], times `factor`; masked slots get 0.
template <typename Scalar>
void store_slots(const Buffer<Accumulate<Scalar>>& total, const std::vector<int>& live, double factor, int64_t b,
                 at::Tensor& out) {
  const int64_t S = out.size(1), H = out.size(2), D = out.size(3), J = live.size(), width = tile_width<Scalar>(D);
  Scalar* image = out.mutable_data_ptr<Scalar>() + b * S * H * D;
  std::fill(image, image + S * H * D, Scalar(0));
  for (int64_t h = 0; h < H; ++h)
    for (int64_t j = 0; j < J; ++j)
      for (int64_t d = 0; d < D; ++d)
        image[(live[j] * H + h) * D + d] =
            static_cast<Scalar>(total[(h * J + j) * width + d] * static_cast<Accumulate<Scalar>>(factor));
}

template <typename Work>
void for_each_image(int64_t images, const Work& work) {
  at::parallel_for(0, images, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) work(b);
  });
}

// rows[r, j] = factor · weights[j, r] for dense rows of J slots, by squares. A vector may run past the end of its row: the
// rows after it, and of its own row the vectors before it, are written later.
template <typename T>
void transpose_to_rows(const T* weights, int J, int count, T factor, T* rows) {
  constexpr int L = Simd<T>::kLanes;
  for (int r = 0; r < count; r += L)
    for (int j = (J - 1) / L * L; j >= 0; j -= L) {
      Vec<T> square[L];
      for (int i = 0; i < L; ++i) square[i] = load(weights + std::min(j + i, J - 1) * kStride + r) * factor;
      transpose<T>(square);
      for (int i = 0; i < std::min(L, count - r); ++i) {
        const int at = (r + i) * J + j;
        if (at + L <= count * J)
          store(rows + at, square[i]);
        else
          for (int lane = 0; lane < std::min(L, J - j); ++lane) rows[at + lane] = square[i][lane];
      }
    }
}

// weights[j, r] = factor · rows[r, j]: the other way round.
template <typename T>
void transpose_from_rows(const T* rows, int J, int count, T factor, T* weights) {
  constexpr int L = Simd<T>::kLanes;
  for (int r = 0; r < count; r += L)
    for (int j = 0; j < J; j += L) {
      Vec<T> square[L] = {};
      for (int i = 0; i < std::min(L, count - r); ++i) {
        const int at = (r + i) * J + j;
        if (at + L <= count * J)
          square[i] = load(rows + at) * factor;
        else
          for (int lane = 0; lane < std::min(L, J - j); ++lane) square[i][lane] = rows[at + lane] * factor;
      }
      transpose<T>(square);
      for (int i = 0; i < std::min(L, J - j); ++i) store(weights + (j + i) * kStride + r, square[i]);
    }
}

// out[n + r, live[j]] = factor · weights[j, r] in image b of out [B, N, S]; masked slots get 0.
template <typename Scalar, typename T>
void store_weights(const T* weights, const std::vector<int>& live, int count, T factor, int64_t b, int64_t n,
                   at::Tensor& out) {
  const int64_t S = out.size(2), J = live.size();
  Scalar* rows = out.mutable_data_ptr<Scalar>() + (b * out.size(1) + n) * S;
  if constexpr (std::is_same_v<Scalar, T>) {
    if (J == S) return transpose_to_rows(weights, J, count, factor, rows);
  }
  std::fill(rows, rows + count * S, Scalar(0));
  for (int r = 0; r < count; ++r)
    for (int64_t j = 0; j < J; ++j) rows[r * S + live[j]] = static_cast<Scalar>(weights[j * kStride + r] * factor);
}

// weights[j, r] = factor · in[n + r, live[j]]: the other way round.
template <typename Scalar, typename T>
void load_weights(const at::Tensor& in, int64_t b, int64_t n, const std::vector<int>& live, int count, T factor,
                  T* weights) {
  const int64_t S = in.size(2), J = live.size();
  const Scalar* rows = in.const_data_ptr<Scalar>() + (b * in.size(1) + n) * S;
  if constexpr (std::is_same_v<Scalar, T>) {
    if (J == S) return transpose_from_rows(rows, J, count, factor, weights);
  }
  for (int r = 0; r < count; ++r)
    for (int64_t j = 0; j < J; ++j) weights[j * kStride + r] = static_cast<T>(rows[r * S + live[j]]) * factor;
}

}  // namespace compgen
