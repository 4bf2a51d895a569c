// What the processor does: vectors of 16 lanes as its registers hold them, and the operations that differ between
// instruction sets. All of them round as their description says, so that every instruction set gives the same numbers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#if !defined(FORETELL_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define FORETELL_AVX512 1
#else
#define FORETELL_AVX512 0
#endif
#if !defined(FORETELL_PORTABLE) && !FORETELL_AVX512 && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FORETELL_AVX2 1
#else
#define FORETELL_AVX2 0
#endif
#if !defined(FORETELL_PORTABLE) && defined(__aarch64__)
#define FORETELL_NEON 1
#else
#define FORETELL_NEON 0
#endif
#if FORETELL_AVX512 && defined(__AVX512BF16__)
#define FORETELL_BF16 1
#else
#define FORETELL_BF16 0
#endif
#if FORETELL_AVX512 && defined(__AVX512VNNI__)
#define FORETELL_VNNI 1
#else
#define FORETELL_VNNI 0
#endif
#if FORETELL_AVX512 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define FORETELL_AMX 1
#else
#define FORETELL_AMX 0
#endif
#if FORETELL_AVX512 || FORETELL_AVX2
#include <immintrin.h>
#elif FORETELL_NEON
#include <arm_neon.h>
#endif

namespace {

constexpr char kInstructions[] =
#if FORETELL_AVX512
    "avx512"
#elif FORETELL_AVX2
    "avx2"
#elif FORETELL_NEON
    "neon"
#else
    "portable"
#endif
#if FORETELL_BF16 || (FORETELL_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
    "+bf16"
#endif
#if FORETELL_VNNI || (FORETELL_AVX2 && defined(__AVXVNNI__))
    "+vnni"
#endif
#if FORETELL_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
    "+i8mm"
#elif FORETELL_NEON && defined(__ARM_FEATURE_DOTPROD)
    "+dotprod"
#endif
#if FORETELL_AMX
    "+amx"
#elif defined(FORETELL_AMX_MODEL)
    "+amx-model"
#endif
    ;

constexpr int kLanes = 16;

#if FORETELL_AVX512
constexpr int kPartLanes = 16;
#elif FORETELL_AVX2
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;

// Sums of 16 lanes that fit in the registers beside what is added to them: of 32 registers 24 on AVX-512 and NEON, of
// 16 registers 12 on AVX2 (and 12 of SSE's in the portable build).
constexpr int kAccumulators = (FORETELL_AVX512 || FORETELL_NEON ? 24 : 12) / kParts;
// Whether a tile of a product has the 32 outputs of a panel; else it has 16 of them, and up to kHalfTokens tokens.
constexpr bool kWholePanels = kAccumulators >= 24;
constexpr int kHalfTokens = 4;

template <class T>
struct PartOf {
  typedef T Type __attribute__((vector_size(4 * kPartLanes)));
};
using FloatPart = PartOf<float>::Type;
using IntPart = PartOf<int32_t>::Type;
using WordPart = PartOf<uint32_t>::Type;

#if FORETELL_AVX512

typedef FloatPart Float;
typedef IntPart Int;
typedef WordPart Word;

template <class V, class Function, class... Arguments>
inline V each_part(const Function& function, const Arguments&... arguments) {
  return (V)function(arguments...);
}

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

template <size_t... I, class V>
inline V shuffle(V a, V b) {
  return __builtin_shufflevector(a, b, (int)I...);
}

#else

// A vector of 16 lanes in several registers. GCC keeps vectors that are wider than a register in memory.
template <class T>
struct Parts {
  using Part = typename PartOf<T>::Type;
  Part part[kParts];

  Parts() = default;
  template <class... Lanes, class = std::enable_if_t<sizeof...(Lanes) == kLanes>>
  Parts(Lanes... lanes) {
    const T all[] = {(T)lanes...};
    for (int i = 0; i < kParts; ++i) std::memcpy(&part[i], all + kPartLanes * i, sizeof(Part));
  }
  template <class U>  // the same bits
  explicit Parts(const Parts<U>& other) {
    for (int i = 0; i < kParts; ++i) part[i] = (Part)other.part[i];
  }
  T operator[](int lane) const { return part[lane / kPartLanes][lane % kPartLanes]; }
};

using Float = Parts<float>;
using Int = Parts<int32_t>;
using Word = Parts<uint32_t>;

template <class V, class Function, class... Arguments>
inline V each_part(const Function& function, const Arguments&... arguments) {
  V out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out.part[i] = (typename V::Part)function(arguments.part[i]...);
  return out;
}

template <class V>
inline V load(const void* p) {
  V v;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) std::memcpy(&v.part[i], (const char*)p + sizeof v.part[i] * i, sizeof v.part[i]);
  return v;
}

template <class T>
inline void store(void* p, const Parts<T>& v) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) std::memcpy((char*)p + sizeof v.part[i] * i, &v.part[i], sizeof v.part[i]);
}

#define FORETELL_OPERATOR(op)                                                             \
  template <class T>                                                                      \
  inline Parts<T> operator op(const Parts<T>& a, const Parts<T>& b) {                     \
    return each_part<Parts<T>>([](auto x, auto y) { return x op y; }, a, b);              \
  }                                                                                       \
  template <class T>                                                                      \
  inline Parts<T>& operator op##=(Parts<T>& a, const Parts<T>& b) {                       \
    return a = a op b;                                                                    \
  }
FORETELL_OPERATOR(+)
FORETELL_OPERATOR(-)
FORETELL_OPERATOR(*)
FORETELL_OPERATOR(/)
FORETELL_OPERATOR(&)
FORETELL_OPERATOR(|)
FORETELL_OPERATOR(^)
#undef FORETELL_OPERATOR
#define FORETELL_COMPARISON(op)                                             \
  template <class T>                                                        \
  inline Int operator op(const Parts<T>& a, const Parts<T>& b) {            \
    return each_part<Int>([](auto x, auto y) { return x op y; }, a, b);     \
  }
FORETELL_COMPARISON(<)
FORETELL_COMPARISON(>)
FORETELL_COMPARISON(<=)
FORETELL_COMPARISON(>=)
FORETELL_COMPARISON(==)
FORETELL_COMPARISON(!=)
#undef FORETELL_COMPARISON
template <class T>
inline Parts<T> operator-(const Parts<T>& a) {
  return each_part<Parts<T>>([](auto x) { return -x; }, a);
}
template <class T>
inline Parts<T> operator~(const Parts<T>& a) {
  return each_part<Parts<T>>([](auto x) { return ~x; }, a);
}
template <class T>
inline Parts<T> operator<<(const Parts<T>& a, int n) {
  return each_part<Parts<T>>([n](auto x) { return x << n; }, a);
}
template <class T>
inline Parts<T> operator>>(const Parts<T>& a, int n) {
  return each_part<Parts<T>>([n](auto x) { return x >> n; }, a);
}

// Which two of the 2 * kParts parts of (a, b) part `to` of a shuffle reads.
template <size_t... I>
struct ShuffleSources {
  static constexpr int index[] = {(int)I...};
  static constexpr int first(int to) { return index[to * kPartLanes] / kPartLanes; }
  static constexpr int second(int to) {
    for (int i = 0; i < kPartLanes; ++i)
      if (index[to * kPartLanes + i] / kPartLanes != first(to)) return index[to * kPartLanes + i] / kPartLanes;
    return first(to);
  }
  static constexpr bool valid() {
    for (int to = 0; to < kParts; ++to)
      for (int i = 0; i < kPartLanes; ++i) {
        const int part = index[to * kPartLanes + i] / kPartLanes;
        if (part != first(to) && part != second(to)) return false;
      }
    return true;
  }
  static constexpr int lane(int to, int i) {
    const int from = index[to * kPartLanes + i];
    return from % kPartLanes + (from / kPartLanes == first(to) ? 0 : kPartLanes);
  }
};

template <class Sources, int To, class V, size_t... L>
inline typename V::Part shuffle_part(const V& a, const V& b, std::index_sequence<L...>) {
  constexpr int f = Sources::first(To), s = Sources::second(To);
  const auto x = f < kParts ? a.part[f % kParts] : b.part[f % kParts];
  const auto y = s < kParts ? a.part[s % kParts] : b.part[s % kParts];
  return __builtin_shufflevector(x, y, Sources::lane(To, L)...);
}

template <class Sources, class V, size_t... To>
inline V shuffle_parts(const V& a, const V& b, std::index_sequence<To...>) {
  V out;
  ((out.part[To] = shuffle_part<Sources, (int)To>(a, b, std::make_index_sequence<kPartLanes>())), ...);
  return out;
}

// Lane i of the result is lane I[i] of a, or of b from 16 on; every part of it comes from two parts.
template <size_t... I, class V>
inline V shuffle(const V& a, const V& b) {
  using Sources = ShuffleSources<I...>;
  static_assert(sizeof...(I) == kLanes && Sources::valid());
  return shuffle_parts<Sources>(a, b, std::make_index_sequence<kParts>());
}

#endif

const Int kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Float splat(float x) { return each_part<Float>([x](FloatPart zero) { return zero + x; }, Float{}); }
inline Word splat(uint32_t x) { return each_part<Word>([x](WordPart zero) { return zero | x; }, Word{}); }
inline Int splat(int32_t x) { return (Int)splat((uint32_t)x); }

// Lanes of a where the mask is set, else of b.
template <class V>
__attribute__((always_inline)) inline V select(Int mask, V a, V b) {
  return each_part<V>([](auto m, auto x, auto y) { return m ? x : y; }, mask, a, b);
}

// Rounded towards zero.
inline Int to_integer(Float v) {
  return each_part<Int>([](auto x) { return __builtin_convertvector(x, IntPart); }, v);
}
inline Float to_float(Int v) {
  return each_part<Float>([](IntPart x) { return __builtin_convertvector(x, FloatPart); }, v);
}

// a * b + c, rounded once. (Rounded twice where the processor has no such instruction.)
inline FloatPart fma_part(FloatPart a, FloatPart b, FloatPart c) {
#if FORETELL_AVX512
  return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FORETELL_AVX2
  return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FORETELL_NEON
  return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__) || defined(__aarch64__)
  for (int i = 0; i < kPartLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline Float fma(Float a, Float b, Float c) { return each_part<Float>(fma_part, a, b, c); }

#if FORETELL_NEON && !defined(__ARM_FEATURE_DOTPROD)
// sum + the four products of a lane's signed bytes, of which those of b are above -128: two have at most 16 bits.
inline int32x4_t add_pairs_of_bytes(int32x4_t sum, int8x16_t a, int8x16_t b) {
  return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
}
#endif

// acc + the sum of the four products of an unsigned byte of w and a signed byte of x, above -128; exact.
inline Int dot_u8s8(Int acc, Word w, Word x) {
  return each_part<Int>(
      [](IntPart sum, WordPart u, WordPart s) {
#if FORETELL_VNNI
        return _mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#elif FORETELL_AVX512
        const __m512i low = _mm512_madd_epi16(_mm512_and_si512((__m512i)u, _mm512_set1_epi16(0xFF)),
                                              _mm512_srai_epi16(_mm512_slli_epi16((__m512i)s, 8), 8)),
                      high = _mm512_madd_epi16(_mm512_srli_epi16((__m512i)u, 8), _mm512_srai_epi16((__m512i)s, 8));
        return _mm512_add_epi32((__m512i)sum, _mm512_add_epi32(low, high));
#elif FORETELL_AVX2 && defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)s);
#elif FORETELL_AVX2
        const __m256i low = _mm256_madd_epi16(_mm256_and_si256((__m256i)u, _mm256_set1_epi16(0xFF)),
                                              _mm256_srai_epi16(_mm256_slli_epi16((__m256i)s, 8), 8)),
                      high = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)u, 8), _mm256_srai_epi16((__m256i)s, 8));
        return _mm256_add_epi32((__m256i)sum, _mm256_add_epi32(low, high));
#elif FORETELL_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
        return vusdotq_s32((int32x4_t)sum, (uint8x16_t)u, (int8x16_t)s);
#elif FORETELL_NEON && defined(__ARM_FEATURE_DOTPROD)
        // w = (w - 128) + 2 * 64
        const int8x16_t half = vdupq_n_s8(64);
        const int32x4_t shift = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half, (int8x16_t)s), half, (int8x16_t)s);
        return vdotq_s32(vaddq_s32((int32x4_t)sum, shift), (int8x16_t)(u ^ 0x80808080u), (int8x16_t)s);
#elif FORETELL_NEON
        // Likewise.
        const int32x4_t shift = vshlq_n_s32(vpaddlq_s16(vpaddlq_s8((int8x16_t)s)), 7);
        return add_pairs_of_bytes(vaddq_s32((int32x4_t)sum, shift), (int8x16_t)(u ^ 0x80808080u), (int8x16_t)s);
#else
        for (int i = 0; i < 32; i += 8) sum += (IntPart)((u >> i) & 0xFFu) * ((IntPart)(s << (24 - i)) >> 24);
        return sum;
#endif
      },
      acc, w, x);
}

// The same for bytes of w below 128, which is quicker on some processors.
inline Int dot_u7s8(Int acc, Word w, Word x) {
#if FORETELL_VNNI || (FORETELL_AVX2 && defined(__AVXVNNI__))
  return dot_u8s8(acc, w, x);
#else
  return each_part<Int>(
      [](IntPart sum, WordPart u, WordPart s) {
#if FORETELL_AVX512
        return _mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)u, (__m512i)s),
                                                                _mm512_set1_epi16(1)));
#elif FORETELL_AVX2
        return _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)u, (__m256i)s),
                                                                _mm256_set1_epi16(1)));
#elif FORETELL_NEON && defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32((int32x4_t)sum, (int8x16_t)u, (int8x16_t)s);
#elif FORETELL_NEON
        return add_pairs_of_bytes((int32x4_t)sum, (int8x16_t)u, (int8x16_t)s);
#else
        for (int i = 0; i < 32; i += 8) sum += (IntPart)((u >> i) & 0xFFu) * ((IntPart)(s << (24 - i)) >> 24);
        return sum;
#endif
      },
      acc, w, x);
#endif
}

// Whether the processor adds two products of bytes as a number of 16 bits.
constexpr bool kShortSums =
#if (FORETELL_AVX2 && !defined(__AVXVNNI__)) || (FORETELL_AVX512 && !FORETELL_VNNI)
    true;
#else
    false;
#endif

// Sums of products of unsigned levels, at most kMost, with signed bytes above -128, four per lane and word: `add` for
// up to kMostWords words, then `whole`. Short sums take as many words in 16 bits as fit, |sum| <= kMostWords * 2 * 127
// * kMost <= 32767, and then the two numbers of a lane at once.
template <int kMost>
struct LevelSum {
  static constexpr bool kShort = kShortSums && kMost < 128;
  static constexpr int most_words() {
    int words = 8;
    while (kShort && words * 2 * 127 * kMost > 32767) words /= 2;
    return words;
  }
  static constexpr int kMostWords = most_words();

  __attribute__((always_inline)) static Int add(Int sum, Word levels, Word x) {
    if constexpr (!kShort) return kMost < 128 ? dot_u7s8(sum, levels, x) : dot_u8s8(sum, levels, x);
    return each_part<Int>(
        [](IntPart s, WordPart u, WordPart v) {
#if FORETELL_AVX512
          __m512i out = _mm512_add_epi16((__m512i)s, _mm512_maddubs_epi16((__m512i)u, (__m512i)v));
          asm("" : "+v"(out));  // else GCC adds in a tree, whose leaves do not fit in the registers
          return out;
#elif FORETELL_AVX2
          __m256i out = _mm256_add_epi16((__m256i)s, _mm256_maddubs_epi16((__m256i)u, (__m256i)v));
          asm("" : "+x"(out));  // likewise
          return out;
#else
          return s;
#endif
        },
        sum, levels, x);
  }

  __attribute__((always_inline)) static Int whole(Int sum) {
    if constexpr (!kShort) return sum;
    return each_part<Int>(
        [](IntPart s) {
#if FORETELL_AVX512
          return _mm512_madd_epi16((__m512i)s, _mm512_set1_epi16(1));
#elif FORETELL_AVX2
          return _mm256_madd_epi16((__m256i)s, _mm256_set1_epi16(1));
#else
          return s;
#endif
        },
        sum);
  }
};

// Whether the processor multiplies bfloat16 numbers; else they are multiplied as the float32 numbers that they are.
constexpr bool kMultipliesBfloat16 =
#if FORETELL_BF16 || (FORETELL_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
    true;
#else
    false;
#endif

// acc + the product of the odd (upper) bfloat16 numbers, then + that of the even ones, each sum rounded: what AVX-512's
// dpbf16 computes, but for denormal numbers, which it takes for zero. Not Arm's bfdot, which rounds otherwise.
inline Float dot_bfloat16(Float acc, Word w, Word x) {
  return each_part<Float>(
      [](FloatPart sum, WordPart u, WordPart v) {
#if FORETELL_BF16
        return _mm512_dpbf16_ps((__m512)sum, (__m512bh)u, (__m512bh)v);
#elif FORETELL_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        const bfloat16x8_t a = vreinterpretq_bf16_u32((uint32x4_t)u), b = vreinterpretq_bf16_u32((uint32x4_t)v);
        return vbfmlalbq_f32(vbfmlaltq_f32((float32x4_t)sum, a, b), a, b);
#else
        sum = fma_part((FloatPart)(u & 0xFFFF0000u), (FloatPart)(v & 0xFFFF0000u), sum);
        return fma_part((FloatPart)(u << 16), (FloatPart)(v << 16), sum);
#endif
      },
      acc, w, x);
}

inline float half_to_float(uint16_t half) {
#if defined(__aarch64__)
  __fp16 number;
  std::memcpy(&number, &half, 2);
  return (float)number;
#else
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3FF;
  uint32_t bits = sign;
  if (exponent == 31) {
    bits |= 0x7F800000u | mantissa << 13;
  } else if (exponent) {
    bits |= (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float tiny = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24, exact
    uint32_t magnitude;
    std::memcpy(&magnitude, &tiny, 4);
    bits |= magnitude;
  }
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
#endif
}

// 16 numbers in half precision.
inline Float load_halves(const void* p) {
#if FORETELL_AVX512
  return (Float)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif FORETELL_AVX2
  Float out;
  for (int i = 0; i < kParts; ++i) out.part[i] = (FloatPart)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i));
  return out;
#else
  uint16_t half[kLanes];
  float lane[kLanes];
  std::memcpy(half, p, sizeof half);
  for (int i = 0; i < kLanes; ++i) lane[i] = half_to_float(half[i]);
  return load<Float>(lane);
#endif
}

// The lower and the upper byte of 16 signed pairs of bytes, as integers.
inline void load_byte_pairs(const void* p, Int& low, Int& high) {
#if FORETELL_AVX512
  const Int both = (Int)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif FORETELL_AVX2
  Int both;
  for (int i = 0; i < kParts; ++i)
    both.part[i] = (IntPart)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + i));
#else
  uint16_t pairs[kLanes];
  int32_t lane[kLanes];
  std::memcpy(pairs, p, sizeof pairs);
  for (int i = 0; i < kLanes; ++i) lane[i] = pairs[i];
  const Int both = load<Int>(lane);
#endif
  low = both << 24 >> 24, high = both << 16 >> 24;
}

// 16 bytes, uint8_t or int8_t, as integers.
template <class Byte>
inline Int load_bytes(const void* p) {
#if FORETELL_AVX512 || FORETELL_AVX2
  Int out;
  for (int i = 0; i < kParts; ++i) {
    const char* at = (const char*)p + kPartLanes * i;
#if FORETELL_AVX512
    const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
    out = (Int)(Byte(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
    out.part[i] = (IntPart)(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#endif
  }
  return out;
#else
  Byte bytes[kLanes];
  int32_t lane[kLanes];
  std::memcpy(bytes, p, sizeof bytes);
  for (int i = 0; i < kLanes; ++i) lane[i] = bytes[i];
  return load<Int>(lane);
#endif
}

// Every byte of the codes, 0 to 15, replaced by that entry of a table.
inline Word lookup_bytes(const uint8_t* table, Word codes) {
#if FORETELL_AVX512
  return (Word)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)codes);
#else
  return each_part<Word>(
      [table](WordPart part) {
#if FORETELL_AVX2
        const __m128i entries = _mm_loadu_si128((const __m128i*)table);
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)part);
#elif FORETELL_NEON
        return vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)part);
#else
        uint8_t bytes[sizeof part];
        std::memcpy(bytes, &part, sizeof part);
        for (uint8_t& byte : bytes) byte = table[byte];
        std::memcpy(&part, bytes, sizeof part);
        return part;
#endif
      },
      codes);
#endif
}

// Two vectors of half words from one. Bit 2 l + h of a mask belongs to half h of lane l. `a` has the halves of `v`
// whose bits are set in the first mask, else zeros; `b` likewise those of the second, but a half that both have comes
// from the other half of its lane.
inline void expand_halves(Word v, const uint32_t* masks, Word& a, Word& b) {
#if FORETELL_AVX512
  const __m512i whole = (__m512i)v, turned = _mm512_rol_epi32(whole, 16);
  const __mmask32 first = _load_mask32((__mmask32*)masks), second = _load_mask32((__mmask32*)masks + 1);
  const __m512i chosen = _mm512_mask_blend_epi16(_kand_mask32(first, second), whole, turned);
  a = (Word)_mm512_maskz_mov_epi16(first, whole);
  b = (Word)_mm512_maskz_mov_epi16(second, chosen);
#elif FORETELL_AVX2
  const __m256i bit =
      _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
  for (int i = 0; i < kParts; ++i) {
    const __m256i whole = (__m256i)v.part[i];
    const auto halves = [&](uint32_t mask) {
      return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((int16_t)(mask >> (16 * i))), bit), bit);
    };
    const __m256i in_first = halves(masks[0]), in_second = halves(masks[1]);
    const __m256i turned = _mm256_or_si256(_mm256_slli_epi32(whole, 16), _mm256_srli_epi32(whole, 16));
    a.part[i] = (WordPart)_mm256_and_si256(whole, in_first);
    b.part[i] = (WordPart)_mm256_and_si256(_mm256_blendv_epi8(whole, turned, in_first), in_second);
  }
#else
  uint32_t lane[kLanes], found[2][kLanes];
  store(lane, v);
  for (int l = 0; l < kLanes; ++l) {
    const auto halves = [l](uint32_t mask) {
      return (mask >> 2 * l & 1) * 0xFFFFu | (mask >> (2 * l + 1) & 1) * 0xFFFF0000u;
    };
    const uint32_t taken = halves(masks[0]), turned = lane[l] << 16 | lane[l] >> 16;
    found[0][l] = lane[l] & taken;
    found[1][l] = ((lane[l] & ~taken) | (turned & taken)) & halves(masks[1]);
  }
  a = load<Word>(found[0]), b = load<Word>(found[1]);
#endif
}

// The lowest byte of every lane, 16 bytes.
inline void store_bytes(void* p, Int v) {
#if FORETELL_AVX512
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif FORETELL_AVX2
  const __m256i low = _mm256_set1_epi32(0xFF);
  const __m256i halves = _mm256_packus_epi32(_mm256_and_si256((__m256i)v.part[0], low),
                                             _mm256_and_si256((__m256i)v.part[1], low));
  const __m256i words = _mm256_packus_epi16(halves, halves);  // lanes 0 to 3, 8 to 11; then 4 to 7, 12 to 15
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(words, order)));
#else
  int32_t lane[kLanes];
  store(lane, v);
  int8_t bytes[kLanes];
  for (int i = 0; i < kLanes; ++i) bytes[i] = (int8_t)lane[i];
  std::memcpy(p, bytes, sizeof bytes);
#endif
}

}  // namespace
