// Bfloat16 weights of which at most two in every four consecutive inputs are not zero (2:4).
//
// Of four inputs and an output a panel holds one word with the two numbers and four bits that say which inputs they
// belong to: 9 bits per weight instead of 16. Products rebuild the words of the dense panel and multiply these, so they
// have the bits of the dense product.

#pragma once

#include "quantized.h"

namespace {

struct TwoOfFour {
  static constexpr int kInputs = kGroupInputs, kBytes = 2 * kInputs;  // in the checkpoint: dense rows of bfloat16
  static constexpr int kQuads = kInputs / 4, kMaskWords = 4 * kQuads, kWords = kMaskWords + kQuads * kPanel;

  // A panel's block: per four inputs the bits of words 0 and 1 of outputs 0 to 15, then of outputs 16 to 31; then per
  // four inputs the numbers of all outputs. Bit 2 l + h belongs to half h of lane l. A half of word 0 comes from the
  // same half of the numbers; one of word 1 from the other half where word 0 has taken it.
  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    for (int q = 0; q < kQuads; ++q) {
      uint16_t x[4];
      std::memcpy(x, block + sizeof x * q, sizeof x);
      uint32_t *bits = panel + 4 * q + 2 * (output / kLanes), *numbers = panel + kMaskWords + kPanel * q + output;
      const auto bit = [&](int half) { return 1u << (2 * (output % kLanes) + half); };
      for (int i = 0; i < 4; ++i)
        if (x[i] & 0x7FFF) {
          const int half = i % 2, from = i >= 2 && (bits[0] & bit(half)) ? 1 - half : half;
          bits[i / 2] |= bit(half);
          *numbers |= (uint32_t)x[i] << (16 * from);
        }
    }
  }

  // Words 2 q and 2 q + 1 of the dense panel, for 16 outputs.
  static void read(const uint32_t* block, int q, int half, Word& first, Word& second) {
    const uint32_t* bits = block + 4 * q + 2 * half;
    expand_halves(load<Word>(block + kMaskWords + kPanel * q + kLanes * half), bits, first, second);
  }
};

// The block as words of P, [word of the input][32 outputs]. Without the pragmas, GCC 12 at -O3 drops the loops of
// Float32.
template <class P>
void widen_two_of_four(const uint32_t* block, uint32_t* words) {
#pragma GCC unroll 8
  for (int q = 0; q < TwoOfFour::kQuads; ++q)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Word first, second;
      TwoOfFour::read(block, q, half, first, second);
      uint32_t* to = words + 4 / P::kDepth * q * kPanel + kLanes * half;
      if constexpr (P::kDepth == 2) {
        store(to, first);
        store(to + kPanel, second);
      } else {
        store(to, first << 16);
        store(to + kPanel, first & splat(0xFFFF0000u));
        store(to + 2 * kPanel, second << 16);
        store(to + 3 * kPanel, second & splat(0xFFFF0000u));
      }
    }
}

// Products of a few tokens in the order of `FloatProduct<Bfloat16>`.
struct TwoOfFourProduct {
  static constexpr int kMaxTokens = kAccumulators / 2;
  static constexpr bool kPrefetchesAhead = false;
  static constexpr bool kSplitsTokens = false;

  // Adds to out[2 * t], out[2 * t + 1] the panel's 32 outputs for token t.
  template <int T, Prefetch kPrefetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    unrolled<kPrefetch>(panel, x, stride, in, next, out, std::make_index_sequence<T>());
  }

 private:
  template <Prefetch kPrefetch, size_t... T>
  static void unrolled(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out,
                       std::index_sequence<T...>) {
    Float low[] = {out[2 * T]...}, high[] = {out[2 * T + 1]...};
    for (int i = 0; i < in; i += TwoOfFour::kInputs) {
      prefetch_block<kPrefetch>(next, TwoOfFour::kWords);
#pragma GCC unroll 8
      for (int q = 0; q < TwoOfFour::kQuads; ++q) {
        Word first, second;
        TwoOfFour::read(panel, q, 0, first, second);
        ((low[T] = Bfloat16::step(low[T], first, splat(x[T * stride + 2 * q]))), ...);
        ((low[T] = Bfloat16::step(low[T], second, splat(x[T * stride + 2 * q + 1]))), ...);
        TwoOfFour::read(panel, q, 1, first, second);
        ((high[T] = Bfloat16::step(high[T], first, splat(x[T * stride + 2 * q]))), ...);
        ((high[T] = Bfloat16::step(high[T], second, splat(x[T * stride + 2 * q + 1]))), ...);
      }
      panel += TwoOfFour::kWords, next += 4 * TwoOfFour::kWords, x += TwoOfFour::kInputs / Bfloat16::kDepth;
    }
    ((out[2 * T] = low[T], out[2 * T + 1] = high[T]), ...);
  }
};

}  // namespace
