// Threads and memory.

#pragma once

#include <atomic>
#include <thread>
#include <utility>

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// Where the threads of a pass wait for each other, some two hundred times. OpenMP's own barrier spins for milliseconds: on a
// machine with other work, two threads that share a core then take turns at that pace. This one gives way at once.
class Gate {
 public:
  void wait(int threads) {
    const int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < kPatience)
        rest();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kPatience = 2000;  // some tens of microseconds: longer than threads of equal work differ
  static void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::atomic<int> arrived_{0}, turn_{0};
};

struct Team {
  int thread = 0, threads = 1;
  Gate* gate = nullptr;
  static Team current(Gate& gate) {
    Team team;
    team.gate = &gate;
#ifdef _OPENMP
    team.thread = omp_get_thread_num(), team.threads = omp_get_num_threads();
#endif
    return team;
  }
  void barrier() const {
    if (threads > 1) gate->wait(threads);
  }
  // This thread's share of n things.
  std::pair<int, int> share(int n) const {
    return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
  }
};

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
