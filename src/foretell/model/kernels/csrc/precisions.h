// Precisions: how numbers are packed into words, and one step of an inner product.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

struct Float32 {
  static constexpr int kDepth = 1;  // numbers in a word
  static constexpr int kWeightWords = 1;
  static Float step(Float acc, Word w, Word x) { return fma((Float)w, (Float)x, acc); }
  // The numbers of words as float32, in the order in which a step adds their products.
  static void widen(const uint32_t* words, Float* numbers) { numbers[0] = load<Float>(words); }
  // Number i of every word as number 0, the others 0; number 0 of every word as number i; number i of every word.
  static Word take(Word w, int) { return w; }
  static Word place(Word w, int) { return w; }
  static Float number(Word w, int) { return (Float)w; }
  // The words of 16 * kDepth numbers.
  static Word from_int8(const int8_t* x) { return (Word)to_float(load_bytes<int8_t>(x)); }
  // The same from numbers n of 4 bits, which stand for 2 n - 15: those of the lower halves of 16 * kDepth bytes, and
  // those of the upper ones.
  static void from_nibbles(const uint8_t* x, Word& low, Word& high) {
    int8_t numbers[2 * kLanes];
    for (int i = 0; i < kLanes; ++i)
      numbers[i] = (int8_t)(2 * (x[i] & 15) - 15), numbers[kLanes + i] = (int8_t)(2 * (x[i] >> 4) - 15);
    low = from_int8(numbers), high = from_int8(numbers + kLanes);
  }
  // Words of kDepth numbers for each lane, as a panel has them.
  static void store_columns(uint32_t* words, const Float* numbers) { store(words, numbers[0]); }
  static Word pack_columns(const Float* numbers) { return (Word)numbers[0]; }
  // n numbers from x, which is zero up to a multiple of 32, into words.
  static void pack(const float* x, int n, uint32_t* words) { std::memcpy(words, x, 4 * (size_t)n); }
};

struct Bfloat16 {
  static constexpr int kDepth = 2;
  static constexpr int kWeightWords = 1;
  static Float step(Float acc, Word w, Word x) { return dot_bfloat16(acc, w, x); }
  static void widen(const uint32_t* words, Float* numbers) {
    const Word both = load<Word>(words);
    numbers[0] = number(both, 1), numbers[1] = number(both, 0);
  }
  static Word take(Word w, int i) { return i ? w >> 16 : w & splat(0xFFFFu); }
  static Word place(Word w, int i) { return i ? w << 16 : w; }
  static Float number(Word w, int i) { return (Float)(i ? w & splat(0xFFFF0000u) : w << 16); }
  static Word from_int8(const int8_t* x) {
#if FORETELL_BF16
    const Float low = to_float(load_bytes<int8_t>(x)), high = to_float(load_bytes<int8_t>(x + kLanes));
    return (Word)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    Int low, high;  // whose floats are bfloat16 numbers
    load_byte_pairs(x, low, high);
    return (Word)to_float(low) >> 16 | ((Word)to_float(high) & splat(0xFFFF0000u));
#endif
  }
  static void from_nibbles(const uint8_t* x, Word& low, Word& high) {
#if FORETELL_BF16
    typedef uint16_t Table __attribute__((vector_size(64)));
    // bfloat16 numbers -15, -13, ... 15, twice: the permutation reads a fifth bit, which is the other number's.
    constexpr Table kTable = {0xC170, 0xC150, 0xC130, 0xC110, 0xC0E0, 0xC0A0, 0xC040, 0xBF80, 0x3F80, 0x4040, 0x40A0,
                              0x40E0, 0x4110, 0x4130, 0x4150, 0x4170, 0xC170, 0xC150, 0xC130, 0xC110, 0xC0E0, 0xC0A0,
                              0xC040, 0xBF80, 0x3F80, 0x4040, 0x40A0, 0x40E0, 0x4110, 0x4130, 0x4150, 0x4170};
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)x));
    low = (Word)_mm512_permutexvar_epi16(bytes, (__m512i)kTable);
    high = (Word)_mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), (__m512i)kTable);
#else
    int8_t numbers[4 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i)
      numbers[i] = (int8_t)(2 * (x[i] & 15) - 15), numbers[2 * kLanes + i] = (int8_t)(2 * (x[i] >> 4) - 15);
    low = from_int8(numbers), high = from_int8(numbers + 2 * kLanes);
#endif
  }
  static uint32_t round(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  }
  // The same, as float32 numbers.
  static Float rounded(Float x) {
    const Word bits = (Word)x;
    return (Float)((bits + splat(0x7FFFu) + ((bits >> 16) & splat(1u))) & splat(0xFFFF0000u));
  }
  static void pack(const float* x, int n, uint32_t* words) {
    int i = 0;
#if FORETELL_BF16
    for (; i + kPanel <= n; i += kPanel)
      store(words + i / 2, _mm512_cvtne2ps_pbh((__m512)load<Float>(x + i + kLanes), (__m512)load<Float>(x + i)));
    for (; i + kLanes <= n; i += kLanes) store(words + i / 2, _mm512_cvtneps_pbh((__m512)load<Float>(x + i)));
#endif
    for (; i < n; i += 2) words[i / 2] = round(x[i]) | round(x[i + 1]) << 16;
  }
  static void store_columns(uint32_t* words, const Float* numbers) { store(words, pack_columns(numbers)); }
  static Word pack_columns(const Float* numbers) {
#if FORETELL_BF16
    typedef int16_t Order __attribute__((vector_size(64)));
    constexpr Order kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
    return (Word)_mm512_permutexvar_epi16((__m512i)kOrder, (__m512i)both);
#else
    return (Word)rounded(numbers[0]) >> 16 | (Word)rounded(numbers[1]);
#endif
  }
};

// Bfloat16 weights as float32 numbers, of a pair the upper one first: where the processor does not multiply bfloat16
// numbers, and weights are widened anyhow, they are not packed before.
struct WidenedBfloat16 : Bfloat16 {
  static constexpr int kWeightWords = 2;
  static void widen(const uint32_t* words, Float* numbers) {
    numbers[0] = load<Float>(words), numbers[1] = load<Float>(words + kPanel);
  }
  static void store_columns(uint32_t* words, const Float* numbers) {
    store(words, rounded(numbers[1])), store(words + kPanel, rounded(numbers[0]));
  }
};

// What a product prefetches into the second-level cache. With few tokens the product is bound by memory and the
// hardware prefetcher works within a page: prefetching half of the lines one page ahead starts it on that page (kHalf).
// With more tokens all lines soon to be read are prefetched, across page ends, where the hardware prefetcher stops
// (kAhead), or half of the next panel (kNext). Words in a scratch buffer need none (kNone).
enum class Prefetch { kHalf, kAhead, kNext, kNone };

// For step k of a panel: a step reads two lines, and 32 steps a page.
template <Prefetch kPrefetch>
inline void prefetch_panel(const uint32_t* panel, const char* next, int k) {
  constexpr int kPage = 32, kSoon = 48;
  if (kPrefetch == Prefetch::kHalf) __builtin_prefetch(panel + kPanel * (k + kPage), 0, 2);
  if (kPrefetch == Prefetch::kAhead)
    for (int line = 0; line < 2; ++line) __builtin_prefetch(panel + kPanel * (k + kSoon) + kLanes * line, 0, 2);
  if (kPrefetch == Prefetch::kNext) __builtin_prefetch(next + 128 * k, 0, 2);
}

// For some words of a block: all lines (kAhead), or every second one (kHalf).
template <Prefetch kPrefetch>
inline void prefetch_block(const char* next, int words) {
  if (kPrefetch == Prefetch::kNone) return;
  for (int line = 0; line < words; line += kPrefetch == Prefetch::kAhead ? kLanes : 2 * kLanes)
    __builtin_prefetch(next + 4 * line, 0, 2);
}

// Where memory bounds a product: every second line, except on AVX2, where half of them leave half of the bandwidth
// unused on Zen 3, whose cores fetch no neighbouring lines by themselves.
constexpr Prefetch kBoundByMemory = kWholePanels ? Prefetch::kHalf : Prefetch::kAhead;

// Products of float32 and bfloat16: one accumulator per output and token, from the first input to the last.
template <class P>
struct FloatProduct {
  static constexpr bool kRoundsEachNumber = true;  // no scale is shared between numbers
  static constexpr int kMaxTokens = kWholePanels ? kAccumulators / 2 : kHalfTokens;
  static constexpr int kFewTokens = 2;             // at most so many tokens are bound by memory
  static constexpr bool kPrefetchesAhead = true;
  static constexpr bool kSplitsTokens = false;
  static size_t row_words(int in) { return ((size_t)in + P::kDepth - 1) / P::kDepth; }
  static size_t panel_words(int in) { return row_words(in) * kPanel; }

  static void quantize(float* x, int in, uint32_t* row) {
    P::pack(x, (in + P::kDepth - 1) / P::kDepth * P::kDepth, row);
  }

  // Adds to out[2 * t], out[2 * t + 1] the panel's 32 outputs for token t.
  template <int T, Prefetch kPrefetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    if constexpr (kWholePanels)
      unrolled<kPrefetch>(panel, x, stride, in, next, out, std::make_index_sequence<T>());
    else
      in_halves<T, kPrefetch>(panel, x, stride, in, next, out);
  }

 private:
  // The 32 outputs in two halves, for few tokens side by side. A panel is read a few steps at a time, which stay in the
  // first-level cache for the second half; the activations of these steps are widened once for all outputs.
  template <int T, Prefetch kPrefetch>
  static void in_halves(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    constexpr int kSteps = 64, kHalves = T < kHalfTokens ? 2 : 1;
    const int steps = (int)row_words(in);
    alignas(64) uint32_t numbers[T][P::kDepth][kSteps];
    for (int first = 0; first < steps; first += kSteps) {
      const int some = std::min(kSteps, steps - first);
      for (int t = 0; t < T; ++t)
        for (int k = 0; k < some; k += kLanes) {
          const Word words = load_part<Word>(x + t * stride + first + k, some - k);
          for (int d = 0; d < P::kDepth; ++d) store(&numbers[t][d][k], P::number(words, P::kDepth - 1 - d));
        }
      for (int half = 0; half < 2; half += kHalves) {
        Float sums[kHalves][T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) sums[h][t] = out[2 * t + half + h];
        for (int k = 0; k < some; ++k) {
          if (!half) prefetch_panel<kPrefetch>(panel, next, first + k);
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
            Float w[P::kDepth];
            P::widen(panel + kPanel * P::kWeightWords * (first + k) + kLanes * (half + h), w);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
              for (int d = 0; d < P::kDepth; ++d)
                sums[h][t] = fma(w[d], (Float)splat(numbers[t][d][k]), sums[h][t]);
          }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) out[2 * t + half + h] = sums[h][t];
      }
    }
  }

  // Unrolled by token, so that every index is a constant and the sums stay in registers.
  template <Prefetch kPrefetch, size_t... T>
  static void unrolled(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out,
                       std::index_sequence<T...>) {
    Float low[] = {out[2 * T]...}, high[] = {out[2 * T + 1]...};
    const int steps = (int)row_words(in);
    for (int k = 0; k < steps; ++k) {
      prefetch_panel<kPrefetch>(panel, next, k);
      const Word w0 = load<Word>(panel + kPanel * k), w1 = load<Word>(panel + kPanel * k + kLanes);
      ((low[T] = P::step(low[T], w0, splat(x[T * stride + k])),
        high[T] = P::step(high[T], w1, splat(x[T * stride + k]))),
       ...);
    }
    ((out[2 * T] = low[T], out[2 * T + 1] = high[T]), ...);
  }
};

// Products of int8 weights and int8 activations, each with one scale per group of inputs.
//
// Both sides are first rotated by the same orthonormal Hadamard matrix over blocks of 64 inputs, which leaves the
// product as it is but spreads a block's outliers over all of it (as in QuaRot, arXiv 2404.00456): on SmolLM2-135M the
// divergence from float32 falls to a quarter. The instruction wants unsigned times signed bytes; the weights are stored
// plus 128 and an activation row holds, per group, its scale and the correction for that: -128 times the sum of its
// bytes.
struct Int8 {
  static constexpr bool kRoundsEachNumber = false;
  static constexpr int kBlock = 64;
  static constexpr int kGroup = 192;
  static constexpr int kMaxTokens = kAccumulators / 2;
  static constexpr int kFewTokens = 2;
  static constexpr bool kPrefetchesAhead = true;
  static constexpr bool kSplitsTokens = false;
  static int padded(int in) { return (in + kBlock - 1) / kBlock * kBlock; }
  static int groups(int in) { return (in + kGroup - 1) / kGroup; }
  static size_t row_words(int in) { return padded(in) / 4 + 2 * (size_t)groups(in); }
  static size_t panel_words(int in) { return kPanel * (size_t)(padded(in) / 4 + groups(in)); }

  static Int step(Int acc, Word w, Word x) { return dot_u8s8(acc, w, x); }

  // Multiplies 64 numbers by the Hadamard matrix over 8, which is orthonormal: distances 32 and 16, then 8 to 1.
  static void rotate(float* x) {
    Float v[4];
    for (int i = 0; i < 4; ++i) v[i] = load<Float>(x + kLanes * i);
    for (int s = 2; s; s /= 2)
      for (int i = 0; i < 4; ++i)
        if (!(i & s)) {
          const Float a = v[i], b = v[i + s];
          v[i] = a + b, v[i + s] = a - b;
        }
    for (int i = 0; i < 4; ++i) {
      butterfly<8>(v[i], std::make_index_sequence<kLanes>());
      butterfly<4>(v[i], std::make_index_sequence<kLanes>());
      butterfly<2>(v[i], std::make_index_sequence<kLanes>());
      butterfly<1>(v[i], std::make_index_sequence<kLanes>());
      store(x + kLanes * i, v[i] * splat(0.125f));
    }
  }
  template <int S, size_t... L>
  static void butterfly(Float& v, std::index_sequence<L...>) {
    const Float sign = {(L & S ? -1.0f : 1.0f)...};
    v = fma(v, sign, shuffle<(L ^ S)...>(v, v));
  }

  static void quantize(float* x, int in, uint32_t* row) {
    for (int first = 0; first < padded(in); first += kGroup) {
      const int count = std::min(kGroup, padded(in) - first);
      row = quantize_group(x + first, count, row);
    }
  }
  static uint32_t* quantize_group(float* x, int count, uint32_t* row) {
    Float most = {};
    for (int i = 0; i < count; i += kBlock) rotate(x + i);
    for (int i = 0; i < count; i += kLanes) most = larger(most, larger(load<Float>(x + i), -load<Float>(x + i)));
    const float peak = largest(most), scale = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
    Int total = {};
    for (int i = 0; i < count; i += kLanes) {
      const Int number = round_product(load<Float>(x + i), inverse);
      total += number;
      store_bytes(row + i / 4, number);
    }
    const int32_t correction = -128 * sum(total);
    std::memcpy(row + count / 4, &scale, 4);
    std::memcpy(row + count / 4 + 1, &correction, 4);
    return row + count / 4 + 2;
  }

  template <int T, Prefetch kPrefetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    for (int words = padded(in) / 4; words > 0; words -= kGroup / 4) {
      const int steps = std::min(kGroup / 4, words);
      Int part[2 * T];
      for (int t = 0; t < T; ++t) part[2 * t] = part[2 * t + 1] = splat((int32_t)x[t * stride + steps + 1]);
      for (int k = 0; k < steps; ++k) {
        prefetch_panel<kPrefetch>(panel, next, k);
        const Word w0 = load<Word>(panel + kPanel * k), w1 = load<Word>(panel + kPanel * k + kLanes);
        for (int t = 0; t < T; ++t) {
          const Word word = splat(x[t * stride + k]);
          part[2 * t] = step(part[2 * t], w0, word);
          part[2 * t + 1] = step(part[2 * t + 1], w1, word);
        }
      }
      prefetch_panel<kPrefetch>(panel, next, steps);  // the scales follow the weights of a group
      const Float s0 = load<Float>(panel + kPanel * steps), s1 = load<Float>(panel + kPanel * steps + kLanes);
      for (int t = 0; t < T; ++t) {
        const Float scale = (Float)splat(x[t * stride + steps]);
        out[2 * t] = fma(to_float(part[2 * t]), s0 * scale, out[2 * t]);
        out[2 * t + 1] = fma(to_float(part[2 * t + 1]), s1 * scale, out[2 * t + 1]);
      }
      panel += kPanel * (steps + 1);
      next += 128 * (steps + 1);
      x += steps + 2;
    }
  }
};

}  // namespace
