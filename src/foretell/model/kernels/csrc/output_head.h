// Output heads: the scores of all outputs, and the largest of them. A head in two stages scores all outputs through a
// layer of low rank, and the best of these again with their exact rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "linear.h"
#include "row_products.h"

namespace {

// A bound that at least `count` of n scores reach, and few more: the count-th largest of the maxima of groups. Groups
// have up to 16 * kLanes scores, so that few are sorted.
float bound_of_best(const float* scores, int n, int count, std::vector<float>& maxima) {
  const int vectors = n / kLanes, per_group = std::clamp(std::min(n / (4 * count), vectors), 1, 16);
  const int groups = vectors / per_group * kLanes;
  if (groups < count) return -INFINITY;
  maxima.resize((size_t)groups);
  for (int g = 0; g < groups / kLanes; ++g) {
    const float* first = scores + g * per_group * kLanes;
    Float most = load<Float>(first);
    for (int i = 1; i < per_group; ++i) most = larger(most, load<Float>(first + i * kLanes));
    store(maxima.data() + g * kLanes, select(most == most, most, splat(-INFINITY)));  // NaN cannot be sorted
  }
  std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
  return maxima[(size_t)count - 1];
}

// Scores the best of a token's n outputs again with exact rows; x are the words of the head's inputs.
template <class P>
void rescore_best(const ExactRows& exact, const Rows& x, int token, float* scores, int n, std::vector<float>& maxima) {
  const Float bound = splat(bound_of_best(scores, n, exact.count, maxima));
  std::vector<int> best;
  for (int i = 0; i < n; i += kLanes) {
    const Float v = load_part<Float>(scores + i, n - i);
    if (!any(v >= bound)) continue;
    for (int lane = 0; lane < std::min(kLanes, n - i); ++lane)
      if (v[lane] >= bound[lane]) best.push_back(i + lane);
  }
  const int count = (int)best.size();
  const auto row = [&](int k) {
    return exact.rows + (size_t)best[(size_t)std::min(k, count - 1)] * (size_t)exact.row_words;
  };
  for (int k = 0; k < count; k += kRowsAtOnce) {
    const uint32_t *rows[kRowsAtOnce], *soon[kRowsAtOnce];
    float out[kRowsAtOnce];
    for (int i = 0; i < kRowsAtOnce; ++i) rows[i] = row(k + i), soon[i] = row(k + kRowsAtOnce + i);
    multiply_rows<P>(rows, soon, x.words + (size_t)token * x.stride, (int)x.stride, out);
    for (int i = 0; i < std::min(kRowsAtOnce, count - k); ++i) scores[best[(size_t)(k + i)]] = out[i];
  }
}

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
    Rows rows = {};
    if (w.exact) rows = operands.prepare(w.exact->operand, x, in, in, norm, eps, team);
    std::vector<float> maxima;
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t) {
      float* own = scores + (size_t)t * (size_t)w.outputs;
      if (w.exact && w.exact->operand == kFloat32Operand)
        rescore_best<Float32>(*w.exact, rows, t, own, w.outputs, maxima);
      else if (w.exact)
        rescore_best<Bfloat16>(*w.exact, rows, t, own, w.outputs, maxima);
      take(t);
    }
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
