// Products of single rows, stored one after the other, with activations.

#pragma once

#include "precisions.h"

namespace {

// Rows that are multiplied side by side.
constexpr int kRowsAtOnce = 4;

// The products of some rows of words with those of activations; `soon` are the rows that come next.
template <class P>
void multiply_rows(const uint32_t* const* rows, const uint32_t* const* soon, const uint32_t* x, int words, float* out) {
  Float sums[kRowsAtOnce] = {};
  for (int k = 0; k < words; k += kLanes) {
    const Word numbers = load_part<Word>(x + k, words - k);
    for (int i = 0; i < kRowsAtOnce; ++i) {
      __builtin_prefetch(soon[i] + k, 0, 3);
      sums[i] = P::step(sums[i], load<Word>(rows[i] + k), numbers);
    }
  }
  for (int i = 0; i < kRowsAtOnce; ++i) out[i] = sum(sums[i]);
}

}  // namespace
