// latent_adam on the CPU: a task does a few candidates, each in one pass over its row of the state. Only the gradient is
// looked at twice, while it lies in the first-level cache: whether it is finite decides what happens to the row.
#ifdef __AVX__
#include <immintrin.h>
#endif

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "rows.h"

namespace compgen {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 1 << 14;  // numbers in a task

inline Vec<double> root(Vec<double> x) {
  for (int lane = 0; lane < Simd<double>::kLanes; ++lane) x[lane] = std::sqrt(x[lane]);
  return x;
}

inline Vec<float> root(Vec<float> x) {
#ifdef __AVX__
  return _mm256_sqrt_ps(x);
#else
  for (int lane = 0; lane < Simd<float>::kLanes; ++lane) x[lane] = std::sqrt(x[lane]);
  return x;
#endif
}

struct Settings {
  double beta1, beta2, eps;
  int64_t patience;
  double tolerance, shrink, least;
};

template <typename T>
class Step {
 public:
  Step(const Tensor& z, const Tensor& first, const Tensor& second, const Tensor& best_z, const Tensor& best_loss,
       const Tensor& rate, const Tensor& steps, const Tensor& stalled, const Tensor& active, const Settings& settings)
      : width_(z.size(1)), z_(z.mutable_data_ptr<T>()), first_(first.mutable_data_ptr<T>()),
        second_(second.mutable_data_ptr<T>()), best_z_(best_z.mutable_data_ptr<T>()),
        best_loss_(best_loss.mutable_data_ptr<T>()), rate_(rate.mutable_data_ptr<T>()),
        steps_(steps.mutable_data_ptr<int32_t>()), stalled_(stalled.mutable_data_ptr<int32_t>()),
        active_(active.mutable_data_ptr<bool>()), settings_(settings) {}

  template <typename Scalar>
  void candidate(int64_t c, const Scalar* grad, T loss) const {
    if (!active_[c]) return;
    const bool known = std::isfinite(loss), better = known && loss < best_loss_[c];
    const bool improved = known && loss < best_loss_[c] * static_cast<T>(1 - settings_.tolerance);
    if (better) {
      best_loss_[c] = loss;
      std::copy_n(z_ + c * width_, width_, best_z_ + c * width_);
    }
    stalled_[c] = improved ? 0 : stalled_[c] + 1;
    if (stalled_[c] >= settings_.patience || !known || !finite(grad))
      go_back(c);
    else
      adam(c, grad);
  }

 private:
  template <typename Scalar>
  bool finite(const Scalar* grad) const {
    Vec<T> none{};  // 0 · x is 0 where x is finite and NaN elsewhere
    for_each_vector<T>(width_, [&](int64_t i, int lanes) { none += load_as<T>(grad + i, lanes) * 0; });
    return sum<T>(none) == 0;
  }

  void go_back(int64_t c) const {
    const bool hopeless = std::isinf(best_loss_[c]);
    if (!hopeless) std::copy_n(best_z_ + c * width_, width_, z_ + c * width_);
    std::fill_n(first_ + c * width_, width_, T(0));
    std::fill_n(second_ + c * width_, width_, T(0));
    steps_[c] = stalled_[c] = 0;
    rate_[c] *= static_cast<T>(settings_.shrink);
    active_[c] = !hopeless && !(rate_[c] < static_cast<T>(settings_.least));
  }

  template <typename Scalar>
  void adam(int64_t c, const Scalar* grad) const {
    const int32_t t = ++steps_[c];
    const T step = rate_[c] / (1 - std::pow(settings_.beta1, t)), scale = 1 / (1 - std::pow(settings_.beta2, t));
    const T keep1 = settings_.beta1, keep2 = settings_.beta2, eps = settings_.eps;
    const T take1 = 1 - settings_.beta1, take2 = 1 - settings_.beta2;
    T *z = z_ + c * width_, *first = first_ + c * width_, *second = second_ + c * width_;
    for_each_vector<T>(width_, [&](int64_t i, int lanes) {
      const Vec<T> g = load_as<T>(grad + i, lanes);
      const Vec<T> m = keep1 * load_as<T>(first + i, lanes) + take1 * g;
      const Vec<T> v = keep2 * load_as<T>(second + i, lanes) + take2 * g * g;
      store_as<T>(first + i, m, lanes);
      store_as<T>(second + i, v, lanes);
      store_as<T>(z + i, load_as<T>(z + i, lanes) - step * m / (root(v * scale) + eps), lanes);
    });
  }

  int64_t width_;
  T *z_, *first_, *second_, *best_z_, *best_loss_, *rate_;
  int32_t *steps_, *stalled_;
  bool* active_;
  Settings settings_;
};

template <typename Scalar, typename T>
void all_candidates(const Step<T>& step, const Tensor& grad, const Tensor& loss) {
  const Scalar* grads = grad.const_data_ptr<Scalar>();
  const T* losses = loss.const_data_ptr<T>();
  const int64_t stride = grad.stride(0), grain = std::max<int64_t>(1, kGrain / grad.size(1));
  at::parallel_for(0, grad.size(0), grain, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) step.candidate(c, grads + c * stride, losses[c]);
  });
}

// What the loops trust, for callers of the raw op.
void check(const Tensor& z, std::initializer_list<Tensor> rows, std::initializer_list<Tensor> numbers,
           const Tensor& grad, const Tensor& loss) {
  TORCH_CHECK(z.dim() == 2 && z.size(1) > 0 && z.is_contiguous() && grad.sizes() == z.sizes(),
              "latent_adam: z of shape ", z.sizes(), " and a gradient of shape ", grad.sizes(),
              "; expected [C, L], z dense");
  for (const Tensor& row : rows)
    TORCH_CHECK(row.sizes() == z.sizes() && row.is_contiguous(), "latent_adam: a row of the state has shape ",
                row.sizes(), "; expected dense [C, L] = ", z.sizes());
  for (const Tensor& number : numbers)
    TORCH_CHECK(number.sizes() == z.sizes().slice(0, 1) && number.is_contiguous(),
                "latent_adam: a number of the state has shape ", number.sizes(), "; expected dense [C] = ", z.size(0));
  TORCH_CHECK(loss.sizes() == z.sizes().slice(0, 1), "latent_adam: loss of shape ", loss.sizes(), "; expected [",
              z.size(0), "]");
}

void step(Tensor z, Tensor first, Tensor second, Tensor best_z, Tensor best_loss, Tensor rate, Tensor steps,
          Tensor stalled, Tensor active, const Tensor& grad_in, const Tensor& loss_in, double beta1, double beta2,
          double eps, int64_t patience, double tolerance, double shrink, double least) {
  check(z, {first, second, best_z}, {best_loss, rate, steps, stalled, active}, grad_in, loss_in);
  const Settings settings{beta1, beta2, eps, patience, tolerance, shrink, least};
  const auto dtype = z.scalar_type(), given = grad_in.scalar_type();
  const Tensor grad = dense_rows(given == at::kDouble || dtype == at::kDouble ? grad_in.to(dtype) : grad_in);
  const Tensor loss = loss_in.to(dtype).contiguous();
  if (dtype == at::kDouble) {
    const Step<double> step(z, first, second, best_z, best_loss, rate, steps, stalled, active, settings);
    return all_candidates<double>(step, grad, loss);
  }
  const Step<float> step(z, first, second, best_z, best_loss, rate, steps, stalled, active, settings);
  if (given == at::kHalf) return all_candidates<at::Half>(step, grad, loss);
  if (given == at::kBFloat16) return all_candidates<at::BFloat16>(step, grad, loss);
  all_candidates<float>(step, grad, loss);
}

}  // namespace

TORCH_LIBRARY_IMPL(compgen, CPU, m) { m.impl("latent_adam", step); }

}  // namespace compgen
