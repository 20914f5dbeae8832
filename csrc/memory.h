// Memory of large results, kept for the next result of the same size. A training step asks for the same sizes again and
// again, and malloc gives such blocks back to the system in between: the first touch of a fresh 32 MiB result then costs
// more than computing it. Blocks lie in huge pages where Linux offers them.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>  // to it a block is in use from malloc to free, until it is told otherwise
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes) (void)0
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) (void)0
#endif

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace compgen {

class Pool {
 public:
  static constexpr size_t kLeast = size_t(1) << 20;  // smaller blocks malloc keeps by itself

  static Pool& instance() {
    static Pool* pool = new Pool;  // never destroyed: tensors may outlive static objects
    return *pool;
  }

  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& idle = idle_[bytes];
    if (idle.empty() && idle_bytes_ > used_bytes_) release();
    void* block = idle.empty() ? fresh(bytes) : idle.back();
    if (!idle.empty()) idle.pop_back(), idle_bytes_ -= bytes;
    used_bytes_ += bytes;
    ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return block;
  }

  void give_back(void* block, size_t bytes) {
    const std::lock_guard lock(mutex_);
    c10::profiledCPUMemoryReporter().Delete(block);
    ASAN_POISON_MEMORY_REGION(block, bytes);
    idle_[bytes].push_back(block);
    idle_bytes_ += bytes;
    used_bytes_ -= bytes;
  }

 private:
  // To the system: another size is asked for while more lies idle than is in use, so the work has changed.
  void release() {
    for (auto& [bytes, blocks] : idle_) {
      for (void* block : blocks) std::free(block);
      blocks.clear();
    }
    idle_bytes_ = 0;
  }

  static void* fresh(size_t bytes) {
    constexpr size_t kHugePage = size_t(1) << 21;
    const size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* block = std::aligned_alloc(kHugePage, rounded);
    TORCH_CHECK(block, "compgen: out of memory: no ", bytes >> 20, " MiB for the result of a kernel");
#ifdef MADV_HUGEPAGE
    madvise(block, rounded, MADV_HUGEPAGE);
#endif
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(block) + bytes, rounded - bytes);
    return block;
  }

  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<void*>> idle_;
  size_t idle_bytes_ = 0, used_bytes_ = 0;
};

// An uninitialised tensor, from the pool where it is large.
inline at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  if (bytes < Pool::kLeast) return at::empty(sizes, options);
  void* block = Pool::instance().take(bytes);
  const auto give_back = [bytes](void* used) { Pool::instance().give_back(used, bytes); };
  at::Tensor result = at::from_blob(block, sizes, give_back, options);
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    result.fill_(std::numeric_limits<double>::quiet_NaN());  // as at::empty does
  return result;
}

}  // namespace compgen
