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

// Word k of four levels of a group, from four words of eight nibbles: those of a word are inputs 0, 4, 1, 5, 2, 6, 3,
// 7.
__attribute__((always_inline)) inline Word nibbles_at(const uint32_t* p, int k) {
  const Word w = load<Word>(p + kPanel * (k / 2));
  return (k % 2 ? w >> 4 : w) & splat(0x0F0F0F0Fu);
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

// Bit `bit` of the levels of word k, from a word with a bit per input: bit 8 j + k belongs to input 4 k + j.
__attribute__((always_inline)) inline Word bits_at(const uint32_t* p, int k, int bit) {
  return ((load<Word>(p) >> k) & splat(0x01010101u)) << bit;
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
// offset of its own, or else the level that stands for zero; whether it has two scales; its largest level. For 16
// outputs, half 0 or 1 of a panel: `level`, the levels of word k of a group as bytes, byte j that of input 4 k + j;
// where these have eight bits `nibble`, their low ones (plane 0) or their high ones; `scale`, of a group, or of its
// inputs 0 to 15 (part 0) and of the others where it has two; `offset`.

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
  static constexpr int kInputs = 32, kZero = kZeroLevel, kMost = (1 << kBits) - 1;
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

  __attribute__((always_inline)) static Word level(const uint32_t* panel, int, int half, int k) {
    const Word low = nibbles_at(panel + kLanes * half, k);
    return kBits == 5 ? low | bits_at(panel + 4 * kPanel + kLanes * half, k, 4) : low;
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int, int half, int) {
    return load_halves(panel + kLevelWords * kPanel + kLanes / 2 * half);
  }
  __attribute__((always_inline)) static Float offset(const uint32_t* panel, int, int half) {
    return load_halves(panel + kLevelWords * kPanel + kPanel / 2 + kLanes / 2 * half);
  }
};

using Q4_0 = Nibbles<4, Symmetric, 8>;
using Q4_1 = Nibbles<4, Asymmetric, 0>;
using Q5_0 = Nibbles<5, Symmetric, 16>;
using Q5_1 = Nibbles<5, Asymmetric, 0>;

// d * (q - z): the second half-precision number of a group is z.
struct Q4_Z : Q4_1 {
  __attribute__((always_inline)) static Float offset(const uint32_t* panel, int group, int half) {
    return -(scale(panel, group, half, 0) * Q4_1::offset(panel, group, half));
  }
};

struct Q8_0 : Symmetric {
  static constexpr int kInputs = 32, kBytes = 34, kZero = 128, kMost = 255, kWords = kPanel * 8 + kPanel / 2;
  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    for (int k = 0; k < kGroupWords; ++k) {
      uint32_t word;
      std::memcpy(&word, block + 2 + 4 * k, 4);
      panel[kPanel * k + output] = word ^ 0x80808080u;
    }
    put_half(panel + 8 * kPanel, output, block);
  }
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int, int half, int k) {
    return load<Word>(panel + kPanel * k + kLanes * half);
  }
  __attribute__((always_inline)) static Word nibble(const uint32_t* panel, int, int half, int k, int plane) {
    return level(panel, 0, half, k) >> 4 * plane & splat(0x0F0F0F0Fu);
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int, int half, int) {
    return load_halves(panel + 8 * kPanel + kLanes / 2 * half);
  }
};

// Q4_K and Q5_K: blocks of 256 inputs; groups of 32 have a scale and a minimum of 6 bits each, in units of the block's
// two half-precision numbers. In a panel the block begins with these units; a group's levels are followed by one byte
// for its scale and one for its minimum.
template <int kBits>
struct KBlock : Asymmetric {
  static constexpr int kInputs = 256, kBytes = kBits == 4 ? 144 : 176, kMost = (1 << kBits) - 1;
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
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int j, int half, int k) {
    const uint32_t* group = panel + kUnits + j * kPerGroup + kLanes * half;
    const Word low = nibbles_at(group, k);
    return kBits == 5 ? low | bits_at(group + 4 * kPanel, k, 4) : low;
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int j, int half, int) {
    return scaled(panel, j, half, 0);
  }
  __attribute__((always_inline)) static Float offset(const uint32_t* panel, int j, int half) {
    return -scaled(panel, j, half, 1);
  }

 private:
  // The scale or the minimum.
  __attribute__((always_inline)) static Float scaled(const uint32_t* panel, int j, int half, int which) {
    const uint32_t* bytes = panel + kUnits + j * kPerGroup + kLevelWords * kPanel;
    return load_halves(panel + kPanel / 2 * which + kLanes / 2 * half) *
           to_float(load_bytes<uint8_t>((const uint8_t*)bytes + kPanel * which + kLanes * half));
  }
};

using Q4_K = KBlock<4>;
using Q5_K = KBlock<5>;

// Blocks of 256 inputs; groups of 16 have a scale of 8 bits in units of the block's half-precision number.
struct Q6_K {
  static constexpr bool kOffset = false, kTwoScales = true;
  static constexpr int kInputs = 256, kBytes = 210, kZero = 32, kMost = 63;
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
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int j, int half, int k) {
    const uint32_t* group = panel + kUnits + j * kPerGroup + kLanes * half;
    return nibbles_at(group, k) | bits_at(group + 4 * kPanel, k, 4) | bits_at(group + 5 * kPanel, k, 5);
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int j, int half, int part) {
    const int8_t* bytes = (const int8_t*)(panel + kUnits + j * kPerGroup + 6 * kPanel) + kLanes * half;
    return load_halves(panel + kLanes / 2 * half) * to_float(load_bytes<int8_t>(bytes + kPanel * part));
  }
};

// Four-bit floats {0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign, in units of a power of two. Levels are twice the number
// plus 12, so that they are not negative; the scale is halved.
struct MXFP4 : Symmetric {
  static constexpr int kInputs = 32, kBytes = 17, kZero = 12, kMost = 24, kWords = kPanel * 4 + kPanel / 4;
  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    pack_halves(panel, output, block + 1);
    ((uint8_t*)(panel + 4 * kPanel))[output] = block[0];
  }
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int, int half, int k) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return lookup_bytes(kTable, nibbles_at(panel + kLanes * half, k));
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int, int half, int) {
    const Int e = load_bytes<uint8_t>((const uint8_t*)(panel + 4 * kPanel) + kLanes * half);
    // 2^(e - 128); below 2^-126 a denormal number.
    return (Float)select(e < splat(1), splat(0x200000), select(e < splat(2), splat(0x400000), (e - splat(1)) << 23));
  }
};

// The same numbers in blocks of 64: a float32 unit, then a scale of 8 bits, E4M3 without its sign, per 16 inputs.
struct NVFP4 {
  static constexpr bool kOffset = false, kTwoScales = true;
  static constexpr int kInputs = 64, kBytes = 40, kZero = MXFP4::kZero, kMost = MXFP4::kMost;
  static constexpr int kUnits = kPanel, kPerGroup = kPanel * 4 + kPanel / 2, kWords = kUnits + 2 * kPerGroup;

  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    panel[output] = load_quad(block);
    for (int j = 0; j < 2; ++j) {
      uint32_t* group = panel + kUnits + j * kPerGroup;
      pack_nibbles(group, output, [&](int k) {
        return (load_quad(block + 8 + 16 * j + k / 4 * 8 + k % 2 * 4) >> (k / 2 % 2 * 4)) & 0x0F0F0F0Fu;
      });
      for (int part = 0; part < 2; ++part)
        ((uint8_t*)(group + 4 * kPanel))[part * kPanel + output] = block[4 + 2 * j + part];
    }
  }
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int j, int half, int k) {
    return MXFP4::level(panel + kUnits + j * kPerGroup, 0, half, k);
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int j, int half, int part) {
    const uint8_t* bytes = (const uint8_t*)(panel + kUnits + j * kPerGroup + 4 * kPanel) + kLanes * half;
    const Int e = load_bytes<uint8_t>(bytes + kPanel * part), bits = e << 20;
    // Halved; an exponent of zero means a denormal number.
    const Float small = (Float)(bits + splat(120 << 23)) - splat(0x1p-7f), large = (Float)(bits + splat(119 << 23));
    return load<Float>(panel + kLanes * half) * select(e < splat(8), small, large);
  }
};

// Four bits choose one of 16 numbers between -127 and 113. Levels are these plus 127.
struct IQ4_NL : Q4_0 {
  static constexpr int kZero = 127, kMost = 240;
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int group, int half, int k) {
    alignas(16) static constexpr uint8_t kTable[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                       128, 140, 152, 165, 180, 196, 216, 240};
    return lookup_bytes(kTable, Q4_0::level(panel, group, half, k));
  }
  __attribute__((always_inline)) static Word nibble(const uint32_t* panel, int group, int half, int k, int plane) {
    alignas(16) static constexpr uint8_t kTables[2][16] = {{0, 7, 12, 14, 14, 12, 9, 5, 0, 12, 8, 5, 4, 4, 8, 0},
                                                           {0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 15}};
    return lookup_bytes(kTables[plane], Q4_0::level(panel, group, half, k));
  }
};

// The same numbers in blocks of 256; groups of 32 have a scale of 6 bits, less 32, in units of the block's
// half-precision number. In a panel the block begins with these units and the scales of its groups, in bytes.
struct IQ4_XS : Symmetric {
  static constexpr int kInputs = 256, kBytes = 136, kZero = IQ4_NL::kZero, kMost = IQ4_NL::kMost;
  static constexpr int kUnits = kPanel / 2, kLevels = kUnits + 8 * kPanel / 4, kPerGroup = 4 * kPanel;
  static constexpr int kWords = kLevels + 8 * kPerGroup;

  static void pack(const uint8_t* block, uint32_t* panel, int output) {
    put_half(panel, output, block);
    for (int j = 0; j < 8; ++j) {
      const int low = block[4 + j / 2] >> (4 * (j % 2)) & 15, high = block[2 + j / 4] >> (2 * (j % 4)) & 3;
      ((int8_t*)(panel + kUnits))[kPanel * j + output] = (int8_t)((low | high << 4) - 32);
      pack_halves(panel + kLevels + j * kPerGroup, output, block + 8 + 16 * j);
    }
  }
  __attribute__((always_inline)) static Word level(const uint32_t* panel, int j, int half, int k) {
    return IQ4_NL::level(panel + kLevels + j * kPerGroup, 0, half, k);
  }
  __attribute__((always_inline)) static Word nibble(const uint32_t* panel, int j, int half, int k, int plane) {
    return IQ4_NL::nibble(panel + kLevels + j * kPerGroup, 0, half, k, plane);
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* panel, int j, int half, int) {
    const int8_t* bytes = (const int8_t*)(panel + kUnits) + kPanel * j + kLanes * half;
    return load_halves(panel + kLanes / 2 * half) * to_float(load_bytes<int8_t>(bytes));
  }
};

template <class K>
size_t quantized_panel_words(int in) {
  return (size_t)in / K::kInputs * K::kWords;
}

// The offset b of the inputs that have a scale a: weights are a * u + b.
template <class K>
__attribute__((always_inline)) inline Float offset_of(const uint32_t* panel, int group, int half, Float scale) {
  if constexpr (K::kOffset) return K::offset(panel, group, half);
  return -(scale * splat((float)K::kZero));
}

// Exact products: `widen_group` writes a group as words of P, [word of the input][32 outputs], as a panel of P has
// them.
template <class P, class K>
void widen_group(const uint32_t* block, int group, uint32_t* words) {
  for (int half = 0; half < 2; ++half) {
    Float scale[2], offset[2] = {};
    for (int part = 0; part < 2; ++part) {
      scale[part] = K::scale(block, group, half, part);
      if constexpr (K::kOffset) offset[part] = K::offset(block, group, half);
    }
#pragma GCC unroll 32
    for (int i = 0; i < kGroupInputs; i += P::kDepth) {
      const Word levels = K::level(block, group, half, i / 4);
      Float numbers[P::kDepth];
      for (int d = 0; d < P::kDepth; ++d) {
        const Word level = (levels >> (8 * ((i + d) % 4))) & splat(0xFFu);
        if constexpr (K::kOffset)
          numbers[d] = fma(to_float((Int)level), scale[i / 16], offset[i / 16]);
        else
          numbers[d] = to_float((Int)level - splat(K::kZero)) * scale[i / 16];
      }
      P::store_columns(words + i / P::kDepth * P::kWeightWords * kPanel + kLanes * half, numbers);
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
        sums[half] = sum(number);
      }
      const float scales[] = {scale, scale * (float)(sums[0] + sums[1]), scale * (float)sums[0],
                              scale * (float)sums[1]};
      std::memcpy(row + kScale, scales, sizeof scales);
    }
  }
};

// Planes of a kind's levels in products with int8 activations: two of four bits where sums are short and levels long.
template <class K>
constexpr int kPlanes = kShortSums && K::kMost > 127 ? 2 : 1;

// Products with int8 activations: integers within a group, then one float32 step per group and scale, in the order of
// the inputs. A tile has as many outputs and tokens as the registers hold sums: both halves of a panel where there are
// 32 registers of 16 lanes, else one half after the other.
template <class K>
struct QuantizedProduct {
  static constexpr int kHalves = kWholePanels ? 2 : 1;
  static constexpr int kMaxTokens = kWholePanels ? 6 : kHalfTokens;
  static constexpr bool kPrefetchesAhead = false;
  static constexpr bool kSplitsTokens = kHalves == 2;

  // Adds to out[2 * t], out[2 * t + 1]: the panel's 32 outputs for token t.
  template <int T, Prefetch kPrefetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    constexpr int kGroups = K::kInputs / kGroupInputs, kPrefetched = K::kWords / kGroups;  // words per group
    Float sums[2 * T];  // where the registers hold them
    Float* acc = kHalves == 2 ? sums : out;
    if (kHalves == 2) std::copy(out, out + 2 * T, sums);
    for (int first = 0; first < in; first += K::kInputs, panel += K::kWords) {
      for (int group = 0; group < kGroups; ++group, x += Int8Blocks::kRowWords, next += 4 * kPrefetched) {
        prefetch_block<kPrefetch>(next, kPrefetched);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half += kHalves) {
          if (kHalves == 1) asm volatile("" ::: "memory");  // what one half has loaded is not kept for the other
          add_group<T>(panel, group, half, x, stride, acc);
        }
      }
    }
    if (kHalves == 2) std::copy(sums, sums + 2 * T, out);
  }

  // The step of a group's sums for one token; `number`: word of its activations that the offset is multiplied with.
  __attribute__((always_inline)) static void finish(Int sum, Float scale, Float offset, const uint32_t* x, int number,
                                                    Float& out) {
    const Float step = scale * (Float)splat(x[Int8Blocks::kScale]);
    out = fma(to_float(sum), step, fma(offset, (Float)splat(x[number]), out));
  }

 private:
  static constexpr int kPlanes = ::kPlanes<K>;
  using Sum = LevelSum<kPlanes == 2 ? 15 : K::kMost>;
  static constexpr int kParts = K::kTwoScales ? 2 : 1, kPartWords = kGroupWords / kParts;
  static constexpr int kSumWords = std::min(kPartWords, Sum::kMostWords), kPartSums = kPartWords / kSumWords;

  // A group for halves half .. half + kHalves - 1.
  template <int T>
  __attribute__((always_inline)) static void add_group(const uint32_t* panel, int group, int half, const uint32_t* x,
                                                       size_t stride, Float* acc) {
    const uint32_t* row[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      row[t] = x + t * stride;
      if (kHalves == 1) asm("" : "+r"(row[t]));  // an address, not a sum of three numbers per word
    }
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Int total[kHalves][T];
#pragma GCC unroll 8
      for (int i = 0; i < kPlanes * kPartSums; ++i) {
        const int plane = i / kPartSums, from = part * kPartWords + i % kPartSums * kSumWords;
        if (kPlanes == 2) asm volatile("" ::: "memory");  // likewise for the planes
        Int sums[kHalves][T] = {};
#pragma GCC unroll 8
        for (int k = from; k < from + kSumWords; ++k) {
          Word levels[kHalves];
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
            if constexpr (kPlanes == 2)
              levels[h] = K::nibble(panel, group, half + h, k, plane);
            else
              levels[h] = K::level(panel, group, half + h, k);
          }
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            const Word word = splat(row[t][k]);
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) sums[h][t] = Sum::add(sums[h][t], levels[h], word);
          }
        }
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            const Int sum = Sum::whole(sums[h][t]) << 4 * plane;
            total[h][t] = i ? total[h][t] + sum : sum;
          }
      }
      const int number = kParts == 1 ? Int8Blocks::kSum : Int8Blocks::kFirstSum + part;
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        const Float scale = K::scale(panel, group, half + h, part);
        const Float offset = offset_of<K>(panel, group, half + h, scale);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
          finish(total[h][t], scale, offset, row[t], number, acc[2 * t + half + h]);
      }
    }
  }
};

// A group of K in scratch, for several blocks of tokens, whose levels are no planes: [word k][32 outputs], then scales
// and offsets in float32. Each block loads what it would unpack again; products have the bits of those of K.
template <class K>
struct Unpacked {
  using Product = QuantizedProduct<Unpacked>;
  static constexpr bool kOffset = K::kOffset, kTwoScales = K::kTwoScales;
  static constexpr int kInputs = kGroupInputs, kZero = K::kZero, kMost = K::kMost;
  static constexpr int kParts = kTwoScales ? 2 : 1, kScales = kGroupWords * kPanel;
  static constexpr int kWords = kScales + (kParts + kOffset) * kPanel;
  static constexpr int kChunk = 4, kMostTokens = 8 * kHalfTokens, kRowWords = Int8Blocks::kRowWords;

  static void write(const uint32_t* block, int group, uint32_t* words) {
    for (int half = 0; half < 2; ++half, words += kLanes) {
#pragma GCC unroll 8
      for (int k = 0; k < kGroupWords; ++k) store(words + k * kPanel, K::level(block, group, half, k));
      for (int part = 0; part < kParts; ++part)
        store(words + kScales + part * kPanel, K::scale(block, group, half, part));
      if constexpr (kOffset) store(words + kScales + kParts * kPanel, K::offset(block, group, half));
    }
  }
  __attribute__((always_inline)) static Word level(const uint32_t* words, int, int half, int k) {
    return load<Word>(words + k * kPanel + kLanes * half);
  }
  __attribute__((always_inline)) static Float scale(const uint32_t* words, int, int half, int part) {
    return load<Float>(words + kScales + part * kPanel + kLanes * half);
  }
  __attribute__((always_inline)) static Float offset(const uint32_t* words, int, int half) {
    return scale(words, 0, half, kParts);
  }
};

}  // namespace
