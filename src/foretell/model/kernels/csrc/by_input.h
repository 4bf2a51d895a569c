// Weights that are stored by input: a row of all outputs for every input, so that the rows of inputs that are zero are
// not read (TEAL, arXiv 2408.14690).
//
// A sum takes the inputs in ascending order, and an input that is zero adds exactly zero, so a token's sums do not
// depend on the inputs that other tokens read.

#pragma once

#include "places.h"
#include "precisions.h"
#include "threads.h"

namespace {

// How a row holds a panel of 32 outputs.
struct Float32Rows {
  static constexpr int kPanelWords = kPanel;
  static void read(const uint32_t* panel, Float& low, Float& high) {
    low = load<Float>(panel);
    high = load<Float>(panel + kLanes);
  }
  static float rounded(float x) { return x; }
};

// Word i holds outputs i and i + 16.
struct Bfloat16Rows {
  static constexpr int kPanelWords = kPanel / 2;
  static void read(const uint32_t* panel, Float& low, Float& high) {
    const Word w = load<Word>(panel);
    low = (Float)(w << 16);
    high = (Float)(w & splat(0xFFFF0000u));
  }
  static float rounded(float x) {
    const uint32_t bits = Bfloat16::round(x) << 16;
    std::memcpy(&x, &bits, 4);
    return x;
  }
};

// The sums of some tokens over the inputs that one of them reads.
template <class R>
class InputSums {
 public:
  // rows [in, stride]; or, where `places` is not null, those of records.
  InputSums(const uint32_t* rows, const NeuronPlaces* places, size_t stride, int in, int tokens)
      : block(std::min(tokens, kMostTokens)),
        width(std::max(1, kTiles / block)),
        rows_(rows),
        places_(places),
        stride_(stride),
        in_(in),
        largest_(buffer<float>((size_t)in)),
        used_(buffer<int32_t>((size_t)in + kAtOnce)),
        value_(buffer<float>(((size_t)in + kAtOnce) * (size_t)block)),
        sums_(buffer<Float>(2 * (size_t)width * (size_t)block)) {}

  // Finds the inputs of `tokens` rows of x whose magnitude is above the threshold.
  void choose(const float* x, size_t x_stride, int tokens, float threshold) {
    tokens_ = tokens;
    for (int i = 0; i < in_; ++i) largest_[i] = std::fabs(x[i]);
    for (int t = 1; t < tokens; ++t)
      for (int i = 0; i < in_; ++i) largest_[i] = std::max(largest_[i], std::fabs(x[(size_t)t * x_stride + (size_t)i]));
    count_ = 0;
    for (int i = 0; i < in_; ++i) {
      used_[count_] = i;
      count_ += largest_[i] > threshold;
    }
    for (int n = 0; n < count_; ++n)
      for (int t = 0; t < tokens; ++t) {
        const float number = x[(size_t)t * x_stride + (size_t)used_[n]];
        value_[n * tokens + t] = std::fabs(number) > threshold ? R::rounded(number) : 0.0f;
      }
    const int last = count_ ? used_[count_ - 1] : 0;
    for (; count_ % kAtOnce; ++count_) {  // adds zero
      used_[count_] = last;
      std::fill_n(value_.get() + count_ * tokens, tokens, 0.0f);
    }
  }

  // Sums of panels first .. last - 1, at most `width`.
  void add(int first, int last) {
    std::fill_n(sums_.get(), 2 * (last - first) * tokens_, Float{});
    for (int n = 0; n < count_; n += kAtOnce) {
      const uint32_t *row[kAtOnce], *soon[kAtOnce];
      for (int k = 0; k < kAtOnce; ++k) {
        row[k] = of(n + k);
        soon[k] = of(std::min(n + kAtOnce + k, count_ - 1));
      }
      const float* value = value_.get() + (size_t)n * (size_t)tokens_;
      for (int p = first; p < last; ++p) {
        Float low[kAtOnce], high[kAtOnce];
        for (int k = 0; k < kAtOnce; ++k) {
          for (int line = 0; line < R::kPanelWords; line += kLanes)
            __builtin_prefetch(soon[k] + p * R::kPanelWords + line, 0, 3);
          R::read(row[k] + p * R::kPanelWords, low[k], high[k]);
        }
        for (int t = 0; t < tokens_; ++t) {
          Float* sum = sums_.get() + 2 * ((p - first) * tokens_ + t);
          Float a = sum[0], b = sum[1];
          for (int k = 0; k < kAtOnce; ++k) {
            const Float x = splat(value[k * tokens_ + t]);
            a = fma(low[k], x, a);
            b = fma(high[k], x, b);
          }
          sum[0] = a, sum[1] = b;
        }
      }
    }
  }

  // The 32 sums of a panel, counted from the first one, for a token.
  const Float* tile(int panel, int token) const { return sums_.get() + 2 * (panel * tokens_ + token); }

 private:
  static constexpr int kMostTokens = 16, kAtOnce = 8;
  static constexpr int kTiles = 192;  // panels times tokens whose sums stay in the first-level cache

  const uint32_t* of(int n) const {
    return places_ ? record_row(*places_, used_[n], kDownRow, stride_) : rows_ + (size_t)used_[n] * stride_;
  }

 public:
  const int block, width;  // most tokens, and most panels at once

 private:
  const uint32_t* rows_;
  const NeuronPlaces* places_;
  const size_t stride_;
  const int in_;
  int tokens_ = 0, count_ = 0;
  const Buffer<float> largest_;
  const Buffer<int32_t> used_;
  const Buffer<float> value_;
  const Buffer<Float> sums_;
};

}  // namespace
