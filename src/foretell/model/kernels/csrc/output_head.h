// Output heads: the scores of all outputs, and the largest of them.

#pragma once

#include <algorithm>

#include "linear.h"

namespace {

// Scores [tokens, w.outputs] of all outputs for x, which is normed first unless `norm` is null. Then calls take(t), by
// one thread, for every token t.
template <class Take>
void score_outputs(const Weight& w, const float* x, const float* norm, float eps, float* scores, int tokens,
                   int threads, const Take& take) {
  const int in = reader(w).inputs;
  const Operands operands(tokens, std::max(w.inputs, in), {0, threads}, w.factor ? w.factor->outputs : 0);
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(barrier);
    operands.multiply(w, x, in, norm, eps, {scores, w.outputs, w.outputs, Epilogue::kStore, 0, 0}, nullptr, team);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t) take(t);
  }
}

// The k largest outputs of a linear layer for each row of x [tokens, in], as probabilities under their softmax.
void linear_topk_softmax(const Weight& w, const float* x, float* probabilities, int64_t* indices, int tokens, int k,
                         int threads) {
  const Buffer<float> scores = buffer<float>((size_t)tokens * w.outputs);
  score_outputs(w, x, nullptr, 0, scores.get(), tokens, threads, [&](int t) {
    topk_softmax_row(scores.get() + (size_t)t * w.outputs, w.outputs, k, probabilities + (size_t)t * k,
                     indices + (size_t)t * k);
  });
}

}  // namespace
