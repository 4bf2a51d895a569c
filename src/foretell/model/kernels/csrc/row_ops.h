// Operations on the rows of a matrix: norms, argmax and top-k.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

// RMS norm (Zhang and Sennrich, arXiv 1910.07467).
void normalize(const float* x, int n, const float* weight, float eps, float* out) {
  Float squares = {};
  for (int i = 0; i < n; i += kLanes) {
    const Float v = load_part<Float>(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const Float factor = splat(1 / std::sqrt(sum(squares) / (float)n + eps));
  for (int i = 0; i < n; i += kLanes) {
    const Float v = load_part<Float>(x + i, n - i) * factor * load_part<Float>(weight + i, n - i);
    store_part(out + i, v, n - i);
  }
}

void norm_rows(const float* x, const float* weight, float eps, float* y, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
  for (int i = 0; i < rows; ++i) normalize(x + (size_t)i * width, width, weight, eps, y + (size_t)i * width);
}

void argmax_row(const float* x, int n, int64_t* out) {
  Float best = splat(-INFINITY);
  Int where = {};
  for (int i = 0; i < n; i += kLanes) {
    Float v = load_part<Float>(x + i, n - i);
    if (n - i < kLanes) v = select(kIota < splat(n - i), v, splat(-INFINITY));
    where = select(v > best, kIota + splat(i), where);
    best = larger(v, best);
  }
  const float most = largest(best);
  int32_t first = n;
  for (int i = 0; i < kLanes; ++i)
    if (best[i] == most) first = std::min(first, where[i]);
  *out = first;
}

// The k largest numbers of a row, descending; of equals the lower index first. Few blocks hold a number above the
// smallest one kept, so most blocks cost one comparison.
void topk_row(const float* x, int n, int k, float* values, int64_t* indices) {
  int kept = 0;
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = std::min(kLanes, n - i);
    const Float v = load_part<Float>(x + i, lanes);
    if (kept == k && lanes == kLanes && !any(v > splat(values[k - 1]))) continue;
    for (int lane = 0; lane < lanes; ++lane) {
      if (kept == k && !(v[lane] > values[k - 1])) continue;
      int place = kept < k ? kept++ : k - 1;
      for (; place > 0 && v[lane] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        indices[place] = indices[place - 1];
      }
      values[place] = v[lane];
      indices[place] = i + lane;
    }
  }
}

// The k largest of a row of logits, as probabilities under its softmax, descending.
void topk_softmax_row(const float* x, int n, int k, float* probabilities, int64_t* indices) {
  topk_row(x, n, k, probabilities, indices);
  const Float most = splat(probabilities[0]);
  Float total = {};
  for (int i = 0; i < n; i += kLanes) {
    const Float e = exponential(load_part<Float>(x + i, n - i) - most);
    total += select(kIota < splat(n - i), e, Float{});
  }
  const float all = sum(total);
  for (int i = 0; i < k; ++i) probabilities[i] = exponential(splat(probabilities[i]) - most)[0] / all;
}

}  // namespace
