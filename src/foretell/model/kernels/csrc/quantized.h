// Quantised weights: the blocks of GGUF files, repacked into panels without loss.
//
// A kind describes how a block is stored. Weights are a * u + b with unsigned levels u, a scale a and an offset b per
// group of inputs; a * u + b is rounded once, so it is the number that `gguf.quants` computes. Products are made in two
// ways. Exact: a chunk of a panel is widened to float32 or bfloat16 words and multiplied as such weights are, which
// gives the bits of the widened model. With int8 activations: integer products of levels and activations, exact within
// a group, and one float32 step per group.

#pragma once

#include "precisions.h"

namespace {

// Numbers of a panel that are side by side: 32 outputs x 32 inputs.
constexpr int kGroupInputs = 32;
constexpr int kGroupWords = kGroupInputs / 4;  // words of four levels or activations

// A group of 32 inputs for 16 outputs, its levels as bytes: byte j of word k is input 4 k + j. Inputs 0 to 15 have
// scale[0] and offset[0], the others the second ones; kinds with one scale per group set both.
struct Group {
  Word levels[kGroupWords];
  Float scale[2], offset[2];
};

// Four words of eight nibbles to eight words of four levels: the nibbles of a word are inputs 0, 4, 1, 5, 2, 6, 3, 7.
inline void unpack_nibbles(const uint32_t* p, Word* levels) {
  for (int k = 0; k < 4; ++k) {
    const Word w = load<Word>(p + kPanel * k);
    levels[2 * k] = w & splat(0x0F0F0F0Fu);
    levels[2 * k + 1] = (w >> 4) & splat(0x0F0F0F0Fu);
  }
}

// Four bytes of a block.
inline uint32_t load_quad(const uint8_t* p) {
  uint32_t quad;
  std::memcpy(&quad, p, 4);
  return quad;
}

// Sets an output's four words of nibbles; `quad(k)` holds the levels of inputs 4 k to 4 k + 3 as bytes.
template <class Quad>
inline void pack_nibbles(uint32_t* words, int output, const Quad& quad) {
  for (int k = 0; k < 4; ++k) words[kPanel * k + output] = quad(2 * k) | quad(2 * k + 1) << 4;
}

// The same from 16 bytes that hold inputs 0 to 15 in their low halves, and the others in their high ones.
inline void pack_halves(uint32_t* words, int output, const uint8_t* bytes) {
  pack_nibbles(words, output, [&](int k) { return (load_quad(bytes + 4 * (k % 4)) >> (k / 4 * 4)) & 0x0F0F0F0Fu; });
}

// Adds one more bit per level, from a word with a bit per input: bit 8 j + k belongs to input 4 k + j, so that a shift
// and a mask give the bits of a word of levels.
inline void add_bits(const uint32_t* p, int shift, Word* levels) {
  const Word bits = load<Word>(p);
  for (int k = 0; k < kGroupWords; ++k) {
    const Word one = (bits >> k) & splat(0x01010101u);
    levels[k] |= one << shift;
  }
}

// Sets an output's word of bits; `quad(k)` holds those of inputs 4 k to 4 k + 3 as bytes.
template <class Quad>
inline void pack_bits(uint32_t* words, int output, const Quad& quad) {
  uint32_t word = 0;
  for (int k = 0; k < kGroupWords; ++k) word |= quad(k) << k;
  words[output] = word;
}

inline void put_half(void* base, int output, const uint8_t* source) {
  std::memcpy((char*)base + 2 * output, source, 2);
}

// Each kind: inputs and bytes of a block in the file; `kWords`, words of a block in a panel; whether a group has an
// offset of its own, or else the level that stands for zero; whether it has two scales.

struct Symmetric {
  static constexpr bool kOffset = false, kTwoScales = false;
};
struct Asymmetric {
  static constexpr bool kOffset = true, kTwoScales = false;
  static constexpr int kZero = 0;
};

// Groups of 32 with a half-precision scale: Q4_0, Q4_1, Q5_0, Q5_1, Q4_Z.
template <int kBits, class Base, int kZeroLevel>
struct Nibbles : Base {
  static constexpr int kInputs = 32, kZero = kZeroLevel;
  static constexpr int kBytes = 2 + (Base::kOffset ? 2 : 0) + (kBits == 5 ? 4 : 0) + 16;
  static constexpr int kLevelWords = 4 + (kBits == 5 ? 1 : 0);
  static constexpr int kWords = kPanel * kLevelWords + kPanel / 2 * (Base::kOffset ? 2 : 1);

  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    const uint8_t* high = block + (Base::kOffset ? 4 : 2);
    const uint8_t* low = high + (kBits == 5 ? 4 : 0);
    pack_halves(panel, output, low);
    if (kBits == 5) {
      const uint32_t fifth = load_quad(high);  // four bits become four bytes
      pack_bits(panel + 4 * kPanel, output,
                [&](int k) { return ((fifth >> (4 * k) & 15) * 0x00204081u) & 0x01010101u; });
    }
    put_half(panel + kLevelWords * kPanel, output, block);
    if (Base::kOffset) put_half(panel + kLevelWords * kPanel + kPanel / 2, output, block + 2);
  }

  __attribute__((always_inline)) static Group read(const uint32_t* panel, int, int half) {
    Group g;
    unpack_nibbles(panel + kLanes * half, g.levels);
    if (kBits == 5) add_bits(panel + 4 * kPanel + kLanes * half, 4, g.levels);
    const uint32_t* scales = panel + kLevelWords * kPanel + kLanes / 2 * half;
    g.scale[0] = g.scale[1] = load_halves(scales);
    if (Base::kOffset) g.offset[0] = load_halves(scales + kPanel / 2);
    return g;
  }
};

using Q4_0 = Nibbles<4, Symmetric, 8>;
using Q4_1 = Nibbles<4, Asymmetric, 0>;
using Q5_0 = Nibbles<5, Symmetric, 16>;
using Q5_1 = Nibbles<5, Asymmetric, 0>;

// d * (q - z): the second half-precision number of a group is z.
struct Q4_Z : Q4_1 {
  __attribute__((always_inline)) static Group read(const uint32_t* panel, int group, int half) {
    Group g = Q4_1::read(panel, group, half);
    g.offset[0] = -(g.scale[0] * g.offset[0]);
    return g;
  }
};

struct Q8_0 : Symmetric {
  static constexpr int kInputs = 32, kBytes = 34, kZero = 128, kWords = kPanel * 8 + kPanel / 2;
  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    for (int k = 0; k < kGroupWords; ++k) {
      uint32_t word;
      std::memcpy(&word, block + 2 + 4 * k, 4);
      panel[kPanel * k + output] = word ^ 0x80808080u;
    }
    put_half(panel + 8 * kPanel, output, block);
  }
  __attribute__((always_inline)) static Group read(const uint32_t* panel, int, int half) {
    Group g;
    for (int k = 0; k < kGroupWords; ++k) g.levels[k] = load<Word>(panel + kPanel * k + kLanes * half);
    g.scale[0] = g.scale[1] = load_halves(panel + 8 * kPanel + kLanes / 2 * half);
    return g;
  }
};

// Q4_K and Q5_K: blocks of 256 inputs; groups of 32 have a scale and a minimum of 6 bits each, in units of the block's
// two half-precision numbers. In a panel the block begins with these units; a group's levels are followed by one byte
// for its scale and one for its minimum.
template <int kBits>
struct KBlock : Asymmetric {
  static constexpr int kInputs = 256, kBytes = kBits == 4 ? 144 : 176;
  static constexpr int kLevelWords = kBits;
  static constexpr int kUnits = kPanel, kPerGroup = kPanel * kLevelWords + kPanel / 2;
  static constexpr int kWords = kUnits + 8 * kPerGroup;

  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    const uint8_t *s = block + 4, *high = block + 16, *low = block + (kBits == 5 ? 48 : 16);
    put_half(panel, output, block);
    put_half(panel + kPanel / 2, output, block + 2);
    for (int j = 0; j < 8; ++j) {
      uint32_t* group = panel + kUnits + j * kPerGroup;
      const auto nibbles = [&](int k) {
        return (load_quad(low + 32 * (j / 2) + 4 * k) >> (j % 2 * 4)) & 0x0F0F0F0Fu;
      };
      pack_nibbles(group, output, nibbles);
      if (kBits == 5)
        pack_bits(group + 4 * kPanel, output, [&](int k) { return (load_quad(high + 4 * k) >> j) & 0x01010101u; });
      uint8_t* bytes = (uint8_t*)(group + kLevelWords * kPanel);
      bytes[output] = (uint8_t)(j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
      bytes[kPanel + output] = (uint8_t)(j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4);
    }
  }
  __attribute__((always_inline)) static Group read(const uint32_t* panel, int j, int half) {
    const uint32_t* group = panel + kUnits + j * kPerGroup;
    const uint8_t* bytes = (const uint8_t*)(group + kLevelWords * kPanel) + kLanes * half;
    Group g;
    unpack_nibbles(group + kLanes * half, g.levels);
    if (kBits == 5) add_bits(group + 4 * kPanel + kLanes * half, 4, g.levels);
    g.scale[0] = g.scale[1] = load_halves(panel + kLanes / 2 * half) * to_float(load_bytes<uint8_t>(bytes));
    g.offset[0] =
        -(load_halves(panel + kPanel / 2 + kLanes / 2 * half) * to_float(load_bytes<uint8_t>(bytes + kPanel)));
    return g;
  }
};

using Q4_K = KBlock<4>;
using Q5_K = KBlock<5>;

// Blocks of 256 inputs; groups of 16 have a scale of 8 bits in units of the block's half-precision number.
struct Q6_K {
  static constexpr bool kOffset = false, kTwoScales = true;
  static constexpr int kInputs = 256, kBytes = 210, kZero = 32;
  static constexpr int kUnits = kPanel / 2, kPerGroup = kPanel * 6 + kPanel / 2;
  static constexpr int kWords = kUnits + 8 * kPerGroup;

  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    put_half(panel, output, block + 208);
    for (int j = 0; j < 8; ++j) {
      const int h = j / 4, part = j % 4;
      uint32_t* group = panel + kUnits + j * kPerGroup;
      pack_nibbles(group, output, [&](int k) {
        return (load_quad(low + 64 * h + 32 * (part % 2) + 4 * k) >> (part / 2 * 4)) & 0x0F0F0F0Fu;
      });
      for (int bit = 0; bit < 2; ++bit)
        pack_bits(group + (4 + bit) * kPanel, output, [&](int k) {
          return (load_quad(high + 32 * h + 4 * k) >> (2 * part + bit)) & 0x01010101u;
        });
    }
    for (int j = 0; j < 16; ++j)
      ((uint8_t*)(panel + kUnits + j / 2 * kPerGroup + 6 * kPanel))[j % 2 * kPanel + output] = scales[j];
  }
  __attribute__((always_inline)) static Group read(const uint32_t* panel, int j, int half) {
    const uint32_t* group = panel + kUnits + j * kPerGroup;
    const int8_t* bytes = (const int8_t*)(group + 6 * kPanel) + kLanes * half;
    Group g;
    unpack_nibbles(group + kLanes * half, g.levels);
    add_bits(group + 4 * kPanel + kLanes * half, 4, g.levels);
    add_bits(group + 5 * kPanel + kLanes * half, 5, g.levels);
    const Float unit = load_halves(panel + kLanes / 2 * half);
    for (int s = 0; s < 2; ++s) g.scale[s] = unit * to_float(load_bytes<int8_t>(bytes + kPanel * s));
    return g;
  }
};

// Four-bit floats {0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign, in units of a power of two. Levels are twice the number
// plus 12, so that they are not negative; the scale is halved.
struct MXFP4 : Symmetric {
  static constexpr int kInputs = 32, kBytes = 17, kZero = 12, kWords = kPanel * 4 + kPanel / 4;
  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    pack_halves(panel, output, block + 1);
    ((uint8_t*)(panel + 4 * kPanel))[output] = block[0];
  }
  __attribute__((always_inline)) static Group read(const uint32_t* panel, int, int half) {
    Group g;
    unpack_nibbles(panel + kLanes * half, g.levels);
    for (int k = 0; k < kGroupWords; ++k) g.levels[k] = numbers(g.levels[k]);
    const Int e = load_bytes<uint8_t>((const uint8_t*)(panel + 4 * kPanel) + kLanes * half);
    // 2^(e - 128); below 2^-126 a denormal number.
    g.scale[0] = g.scale[1] =
        (Float)select(e < splat(1), splat(0x200000), select(e < splat(2), splat(0x400000), (e - splat(1)) << 23));
    return g;
  }

 private:
  static Word numbers(Word codes) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return lookup_bytes(kTable, codes);
  }
};

template <class K>
size_t quantized_panel_words(int in) {
  return (size_t)in / K::kInputs * K::kWords;
}

// The offset b of the inputs that have a scale a: weights are a * u + b.
template <class K>
__attribute__((always_inline)) inline Float offset_of(const Group& g, int part) {
  return K::kOffset ? g.offset[0] : -(g.scale[part] * splat((float)K::kZero));
}

// Weights of 16 outputs for input i of a group.
template <class K>
__attribute__((always_inline)) inline Float widen(const Group& g, const Float* offset, int i) {
  const Word level = (g.levels[i / 4] >> (8 * (i % 4))) & splat(0xFFu);
  return fma(to_float((Int)level), g.scale[i / 16], offset[i / 16]);
}

// Exact products: `widen_group` writes a group as words of P, [word of the input][32 outputs], as a panel of P has
// them.
template <class P, class K>
void widen_group(const uint32_t* block, int group, uint32_t* words) {
  for (int half = 0; half < 2; ++half) {
    const Group g = K::read(block, group, half);
    const Float offset[2] = {offset_of<K>(g, 0), offset_of<K>(g, 1)};
#pragma GCC unroll 32
    for (int i = 0; i < kGroupInputs; i += P::kDepth) {
      Float numbers[P::kDepth];
      for (int d = 0; d < P::kDepth; ++d) numbers[d] = widen<K>(g, offset, i + d);
      store(words + i / P::kDepth * kPanel + kLanes * half, P::pack_columns(numbers));
    }
  }
}

// Activations in int8 with one scale per group of 32. A row holds, per group, eight words of bytes, the scale, and the
// scale times the sum of all bytes, of the first 16 and of the last 16.
struct Int8Blocks {
  static constexpr bool kRoundsEachNumber = false;
  static constexpr int kRowWords = kGroupWords + 4;
  enum { kScale = kGroupWords, kSum, kFirstSum, kSecondSum };
  static size_t row_words(int in) { return (size_t)(in + kGroupInputs - 1) / kGroupInputs * kRowWords; }

  // x is zero up to a multiple of 64.
  static void quantize(float* x, int in, uint32_t* row) {
    for (int first = 0; first < in; first += kGroupInputs, row += kRowWords) {
      const Float a = load<Float>(x + first), b = load<Float>(x + first + kLanes);
      const float peak = largest(larger(larger(a, -a), larger(b, -b)));
      const float scale = peak / 127, inverse = peak > 0 ? 127 / peak : 0;
      int32_t sums[2];
      for (int half = 0; half < 2; ++half) {
        const Int number = round_product(half ? b : a, inverse);
        store_bytes(row + kGroupWords / 2 * half, number);
        sums[half] = total(number);
      }
      const float scales[] = {scale, scale * (float)(sums[0] + sums[1]), scale * (float)sums[0],
                              scale * (float)sums[1]};
      std::memcpy(row + kScale, scales, sizeof scales);
    }
  }

 private:
  static int32_t total(Int v) {
#if FORETELL_AVX512
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += v[i];
    return sum;
#endif
  }
};

// Products with int8 activations: integers within a group, then one float32 step per group and scale, in the order of
// the inputs.
template <class K>
struct QuantizedProduct {
  static constexpr int kMaxTokens = 6;
  static constexpr bool kPrefetchesAhead = false;
  static constexpr bool kSplitsTokens = true;

  // Adds to out[2 * t], out[2 * t + 1]: the panel's 32 outputs for token t.
  template <int T, Prefetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    unrolled(panel, x, stride, in, next, out, std::make_index_sequence<T>());
  }

  // The step of a group's sums for one token; `number`: word of its activations that the offset is multiplied with.
  __attribute__((always_inline)) static void finish(Int sum, Float scale, Float offset, const uint32_t* x, int number,
                                                    Float& out) {
    const Float step = scale * (Float)splat(x[Int8Blocks::kScale]);
    out = fma(to_float(sum), step, fma(offset, (Float)splat(x[number]), out));
  }

 private:
  template <size_t... T>
  static void unrolled(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out,
                       std::index_sequence<T...>) {
    Float acc[] = {out[2*T]..., out[2*T+1]...};
    constexpr int kGroups = K::kInputs / kGroupInputs, kPrefetched = K::kWords / kGroups;  // words per group
    for (int first = 0; first < in; first += K::kInputs, panel += K::kWords) {
      for (int group = 0; group < kGroups; ++group, x += Int8Blocks::kRowWords, next += 4 * kPrefetched) {
        for (int line = 0; line < kPrefetched; line += 2 * kLanes) __builtin_prefetch(next + 4 * line, 0, 2);
        const Group low = K::read(panel, group, 0), high = K::read(panel, group, 1);
        constexpr int kParts = K::kTwoScales ? 2 : 1, kWords = kGroupWords / kParts;
        for (int part = 0; part < kParts; ++part) {
          Int sums[] = {((void)T, Int{})..., ((void)T, Int{})...};
          for (int k = part * kWords; k < (part + 1) * kWords; ++k)
            (add(low.levels[k], high.levels[k], splat(x[T * stride + k]), sums[T], sums[sizeof...(T) + T]), ...);
          const int number = kParts == 1 ? Int8Blocks::kSum : Int8Blocks::kFirstSum + part;
          const Float offset[] = {offset_of<K>(low, part), offset_of<K>(high, part)};
          ((finish(sums[T], low.scale[part], offset[0], x + T * stride, number, acc[T]),
            finish(sums[sizeof...(T) + T], high.scale[part], offset[1], x + T * stride, number, acc[sizeof...(T) + T])),
           ...);
        }
      }
    }
    ((out[2 * T] = acc[T], out[2 * T + 1] = acc[sizeof...(T) + T]), ...);
  }

  __attribute__((always_inline)) static void add(Word low, Word high, Word x, Int& low_sum, Int& high_sum) {
    low_sum = K::kZero < 128 ? dot_u7s8(low_sum, low, x) : dot_u8s8(low_sum, low, x);
    high_sum = K::kZero < 128 ? dot_u7s8(high_sum, high, x) : dot_u8s8(high_sum, high, x);
  }
};

}  // namespace
