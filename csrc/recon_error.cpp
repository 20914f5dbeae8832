// recon_error on the CPU: loss[c] = Σ w (y − x)² and grad = 2 w (y − x) in one pass over y [C, N, F]. A candidate is
// one task, so the order of its sum does not depend on the number of threads. kLanes pixels are F vectors of colours;
// their kLanes weights are spread over these by F shuffles.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <span>

#include "rows.h"

namespace compgen {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr int kMostColours = 16;
constexpr int kRun = 64;  // blocks of kLanes pixels whose sum stays in the accumulation type; runs add up in double

// Bytes as numbers. Widened by two and by two: asked for four at once, GCC goes element by element.
inline void read_bytes(const uint8_t* from, Vec<float>& to) {
  typedef uint8_t Bytes __attribute__((vector_size(8), aligned(1)));
  typedef uint16_t Halves __attribute__((vector_size(16)));
  const auto halves = __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Halves);
  to = __builtin_convertvector(__builtin_convertvector(halves, Simd<float>::Mask), Vec<float>);
}

inline void read_bytes(const uint8_t* from, Vec<double>& to) {
  to = Vec<double>{double(from[0]), double(from[1]), double(from[2]), double(from[3])};
}

// kLanes values of a target image. Bytes count as value / 255, which is a product with 1/255 and what that lacks: with
// a fused multiply-add exactly the rounded quotient, sooner than by division.
template <typename T, typename Source>
inline Vec<T> target(const Source* from) {
  if constexpr (std::is_same_v<Source, uint8_t>) {
    Vec<T> x;
    read_bytes(from, x);
    const Vec<T> quotient = x * (T(1) / 255);
    return quotient + (x - quotient * 255) * (T(1) / 255);
  } else {
    return widen(from);
  }
}

// Rows [pixels, colours] of the image a candidate belongs to, and the weights of its pixels: in place, or gathered
// where only some pixels are asked for. Candidates of one image mostly follow each other, so it is gathered once for all.
template <typename Source, typename T>
class Image {
 public:
  Image(const Tensor& x, const Optional& weights, const Optional& pixels)
      : x_(x.const_data_ptr<Source>()), weights_(weights ? weights->const_data_ptr<T>() : nullptr),
        pixels_(pixels ? pixels->const_data_ptr<int64_t>() : nullptr), count_(pixels ? pixels->size(0) : 0),
        size_(x.size(1)), colours_(x.size(2)) {
    if (pixels_) rows_.resize(count_ * colours_), row_weights_.resize(weights_ ? count_ : 0);
  }

  void open(int64_t image) {
    if (image == open_) return;
    open_ = image;
    rows = x_ + image * size_ * colours_;
    weights = weights_ ? weights_ + image * size_ : nullptr;
    if (pixels_) gather();
  }

  const Source* rows = nullptr;
  const T* weights = nullptr;

 private:
  void gather() {
    for (int64_t n = 0; n < count_; ++n)
      std::copy_n(rows + pixels_[n] * colours_, colours_, rows_.data() + n * colours_);
    rows = rows_.data();
    if (!weights) return;
    for (int64_t n = 0; n < count_; ++n) row_weights_[n] = weights[pixels_[n]];
    weights = row_weights_.data();
  }

  const Source* x_;
  const T* weights_;
  const int64_t* pixels_;
  int64_t count_, size_, colours_, open_ = -1;
  std::vector<Source> rows_;
  std::vector<T> row_weights_;
};

// The vectors of kLanes pixels; a block that is cut short, or whose pixels do not lie side by side, is copied first.
template <typename Scalar>
inline const Scalar* dense_block(const Scalar* from, int64_t stride, int count, int colours, int lanes, Scalar* copy) {
  if (count == lanes && stride == colours) return from;
  for (int r = 0; r < count; ++r) std::copy_n(from + r * stride, colours, copy + r * colours);
  std::fill(copy + count * colours, copy + lanes * colours, Scalar(0));
  return copy;
}

template <typename T>
class Spread {  // the weights of kLanes pixels → those of the k-th vector of their colours
 public:
  explicit Spread(int colours) {
    constexpr int L = Simd<T>::kLanes;
    for (int k = 0; k < colours; ++k)
      for (int lane = 0; lane < L; ++lane) pixel_[k][lane] = (k * L + lane) / colours;
  }
  Vec<T> operator()(Vec<T> weights, int k) const { return __builtin_shuffle(weights, pixel_[k]); }

 private:
  typename Simd<T>::Mask pixel_[kMostColours];
};

template <bool kWeighted, typename Scalar, typename Source>
double candidate(const Scalar* y, int64_t stride, const Image<Source, Accumulate<Scalar>>& image, int64_t pixels,
                 int colours, const Spread<Accumulate<Scalar>>& spread, Scalar* grad) {
  using T = Accumulate<Scalar>;
  constexpr int L = Simd<T>::kLanes;
  Scalar y_copy[L * kMostColours], grad_copy[L * kMostColours];
  Source x_copy[L * kMostColours];
  double loss = 0;
  for (int64_t run = 0; run < pixels; run += kRun * L) {
    Vec<T> total{};
    for (int64_t n = run; n < std::min(run + kRun * L, pixels); n += L) {
      const int count = std::min<int64_t>(L, pixels - n);
      const Scalar* from = dense_block(y + n * stride, stride, count, colours, L, y_copy);
      const Source* x = dense_block(image.rows + n * colours, colours, count, colours, L, x_copy);
      Scalar* to = count == L ? grad + n * colours : grad_copy;
      Vec<T> weights{};
      if constexpr (kWeighted) weights = load_as<T>(image.weights + n, count);
      for (int k = 0; k < colours; ++k) {
        const Vec<T> difference = widen(from + k * L) - target<T>(x + k * L);
        Vec<T> pull = difference;
        if constexpr (kWeighted) pull *= spread(weights, k);
        total += pull * difference;
        narrow(to + k * L, pull + pull);
      }
      if (count < L) std::copy_n(grad_copy, count * colours, grad + n * colours);
    }
    loss += sum<T>(total);
  }
  return loss;
}

template <typename Scalar, typename Source>
void all_candidates(const Tensor& y, const Tensor& x, const Optional& weights, const Optional& images,
                    const Optional& pixels, Tensor& loss, Tensor& grad) {
  using T = Accumulate<Scalar>;
  const int64_t C = y.size(0), N = y.size(1), F = y.size(2);
  const Scalar* from = y.const_data_ptr<Scalar>();
  const int64_t* image_of = images ? images->const_data_ptr<int64_t>() : nullptr;
  Scalar* to = grad.mutable_data_ptr<Scalar>();
  T* losses = loss.mutable_data_ptr<T>();
  const Spread<T> spread(F);
  const auto work = weights ? candidate<true, Scalar, Source> : candidate<false, Scalar, Source>;
  at::parallel_for(0, C, 1, [&](int64_t first, int64_t last) {
    Image<Source, T> image(x, weights, pixels);
    for (int64_t c = first; c < last; ++c) {
      image.open(image_of ? image_of[c] : c);
      losses[c] = work(from + c * y.stride(0), y.stride(1), image, N, F, spread, to + c * N * F);
    }
  });
}

void check_index(const char* name, const Optional& index, int64_t count, int64_t size) {
  if (!index) return;
  TORCH_CHECK(index->scalar_type() == at::kLong && index->sizes() == at::IntArrayRef({count}), "recon_error: ", name,
              " of shape ", index->sizes(), "; expected int64 [", count, "]");
  for (const int64_t i : std::span(index->const_data_ptr<int64_t>(), count))
    TORCH_CHECK_INDEX(0 <= i && i < size, "recon_error: ", name, " has index ", i, "; x has ", size, " ", name,
                      ", counted from 0");
}

std::tuple<Tensor, Tensor> forward(const Tensor& y_in, const Tensor& x_in, const Optional& weights_in,
                                   const Optional& images_in, const Optional& pixels_in) {
  TORCH_CHECK(y_in.dim() == 3 && x_in.dim() == 3 && x_in.size(2) == y_in.size(2) && y_in.size(2) <= kMostColours &&
                  (images_in || x_in.size(0) == y_in.size(0)) && (pixels_in || x_in.size(1) == y_in.size(1)) &&
                  (!weights_in || weights_in->sizes() == x_in.sizes().slice(0, 2)),
              "recon_error: y of shape ", y_in.sizes(), " and x of shape ", x_in.sizes(),
              "; expected [C, N, F] and [I, P, F], and weights of shape [I, P]");
  const Optional images = contiguous(images_in), pixels = contiguous(pixels_in);
  check_index("images", images, y_in.size(0), x_in.size(0));
  check_index("pixels", pixels, y_in.size(1), x_in.size(1));
  const Tensor y = dense_rows(y_in);
  const auto exact = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Optional weights = weights_in ? std::optional(weights_in->to(exact).contiguous()) : std::nullopt;
  Tensor loss = at::empty({y.size(0)}, y.options().dtype(exact)), grad = empty_result(y.sizes(), y.options());
  const bool direct = x_in.scalar_type() == at::kByte || x_in.scalar_type() == y.scalar_type();
  const Tensor x = (direct ? x_in : x_in.to(exact)).contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "recon_error", [&] {
    if (x.scalar_type() == at::kByte)
      all_candidates<scalar_t, uint8_t>(y, x, weights, images, pixels, loss, grad);
    else if (x.scalar_type() == y.scalar_type())
      all_candidates<scalar_t, scalar_t>(y, x, weights, images, pixels, loss, grad);
    else
      all_candidates<scalar_t, Accumulate<scalar_t>>(y, x, weights, images, pixels, loss, grad);
  });
  return {loss, grad};
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) { m.impl("recon_error", forward); }

}  // namespace compgen
