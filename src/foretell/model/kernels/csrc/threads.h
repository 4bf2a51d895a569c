// Threads and memory.

#pragma once

#include <atomic>
#include <thread>
#include <utility>

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

// Both translation units use these.
namespace foretell __attribute__((visibility("hidden"))) {

// A barrier for the threads of a pass, which wait at it some two hundred times. OpenMP's own barrier spins for
// milliseconds, which stalls threads that share a core with other work. This one yields after some tens of
// microseconds.
class Barrier {
 public:
  void wait(int threads) {
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
      if (spins < kSpinsBeforeYield)
        pause_cpu();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpinsBeforeYield =
      2000;  // some tens of microseconds: longer than threads with equal work differ
  static void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::atomic<int> arrived_{0}, generation_{0};
};

struct Team {
  int thread = 0, threads = 1;
  Barrier* shared_barrier = nullptr;
  static Team current(Barrier& barrier) {
    Team team;
    team.shared_barrier = &barrier;
#ifdef _OPENMP
    team.thread = omp_get_thread_num(), team.threads = omp_get_num_threads();
#endif
    return team;
  }
  void barrier() const {
    if (threads > 1) shared_barrier->wait(threads);
  }
  // This thread's share of n items.
  std::pair<int, int> share(int n) const {
    return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
  }
};

}  // namespace foretell

using namespace foretell;

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> buffer(size_t count) {
  return Buffer<T>((T*)std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64));
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

}  // namespace
