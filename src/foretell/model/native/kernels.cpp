// The decoder's CPU kernels: plain C++17 on raw pointers, called through ctypes.
//
// One promise shapes everything here: what is computed for a token never depends on its company. Every sum over an
// inner dimension runs in one fixed order, with the same instructions for every number of tokens, and attention walks
// a token's visible keys in the order of the text, wherever in the cache they lie. So a token verified in a tree gets,
// bit for bit, what it would have got decoded alone. For the same reason multiply-adds are explicit (`fma` below) and
// the file must be compiled with -ffp-contract=off.
//
// Everything a matrix product reads is a 32-bit *word*: one float32, two bfloat16 or four int8. Weights are packed into
// panels of 32 outputs, [word of the input][output], so that one 64-byte vector holds the same input word of 16 outputs
// and meets one word of the activations, copied to all lanes. Precisions differ in `step` alone.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#if (defined(__AVX512F__) || defined(__AVX2__)) && !defined(FORETELL_PORTABLE)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(FORETELL_PORTABLE)
#define FORETELL_AVX512 1
#else
#define FORETELL_AVX512 0
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

// ---- What Python passes in; structures.py mirrors these structures field by field. ----

extern "C" {

enum Precision : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct Weight {           // one packed linear layer
  const uint32_t* words;  // panels of 32 outputs
  const float* bias;      // padded to whole panels, or null
  int32_t in, out;        // out counts gate and up outputs, each padded to 16, when the two are interleaved
};

struct Layer {
  Weight qkv, output, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // null where the architecture has none
  const float *cos, *sin;                                              // [context, head_dim / 2]
  int32_t window;                                                      // 0: full attention
  int32_t attention, mlp;                                              // 0: the residual passes this half by
};

struct Model {
  int32_t hidden, heads, kv_heads, head_dim, ffn, context;
  int32_t precision, activation;
  float eps, scale, softcap;
};

struct Stage {  // of a multi-stage MLP speculator
  Weight project, token, output, head;
  const float *norm_weight, *norm_bias;
  float eps;
};

struct Embedding {
  const void* table;      // [vocab, hidden], float32 or, as `halves`, the upper halves of it
  int32_t vocab, halves;
  float scale;  // what rows are multiplied by
};

struct Entry {  // how EAGLE-3's layers begin: with embeddings of tokens and features of positions
  Embedding embedding;
  const float *embedding_norm, *feature_norm;
  int32_t normed;  // the residual stream starts from the normed feature
  // Features from `kinds` states of the target side by side: each normed with its own scale (null: as it is), then through `fuse`.
  int32_t kinds;
  const float* state_norms;
  Weight fuse;
};

struct Beam {  // a tree by confidence for each of some texts, which the layers have read up to the root
  int32_t texts, depth, width, budget;
  double least, stop;  // a node's score at least; the best of a level below which none is gone on from
  // Of every text: tokens that it has room for, 1 or more; where its keys are, and how many, for layers that have some.
  const int64_t *room, *row, *length;
};

struct Tokens {  // see `Layout` in Python
  int32_t count, extras;
  const int32_t *row, *slot, *position, *prefix;
  const int32_t* extra;  // [count, extras], -1 past the end of a token's list
};

struct Taps {  // layers, ascending, before which the residual stream is wanted: out [count, tokens, hidden]
  const int32_t* layer;
  int32_t count;
  float* out;
};

struct Cache {  // [layers, rows, kv_heads, slots, head_dim]
  uint32_t *k, *v;
  int32_t rows, slots;
};
}

namespace {

// ---- Vectors of 16 lanes. GCC and Clang split them where registers are narrower. ----

constexpr int kLanes = 16;
constexpr int kPanel = 2 * kLanes;

typedef float Float __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));
typedef uint32_t Word __attribute__((vector_size(64)));

constexpr Int kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Float splat(float x) { return Float{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Word splat(uint32_t x) { return Word{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Int splat(int32_t x) { return (Int)splat((uint32_t)x); }

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

// The first n lanes; the others are zero.
template <class V>
inline V load_part(const void* p, int n) {
  if (n >= kLanes) return load<V>(p);
#if FORETELL_AVX512
  return (V)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#else
  V v = {};
  std::memcpy(&v, p, 4 * (size_t)n);
  return v;
#endif
}

template <class V>
inline void store_part(void* p, V v, int n) {
  if (n >= kLanes)
    store(p, v);
  else
    std::memcpy(p, &v, 4 * (size_t)n);
}

inline Float fma(Float a, Float b, Float c) {
#if FORETELL_AVX512
  return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__) && !defined(FORETELL_PORTABLE)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, 64);
  return c;
#else
  return a * b + c;
#endif
}

inline Float larger(Float a, Float b) { return a > b ? a : b; }
inline Float smaller(Float a, Float b) { return a < b ? a : b; }

// The sum of all lanes, neighbours at distance 8, 4, 2, 1: one fixed order.
inline float sum(Float v) {
  float lane[kLanes];
  store(lane, v);
  for (int s = kLanes / 2; s; s /= 2)
    for (int i = 0; i < s; ++i) lane[i] += lane[i + s];
  return lane[0];
}

inline float largest(Float v) {
  float lane[kLanes];
  store(lane, v);
  for (int s = kLanes / 2; s; s /= 2)
    for (int i = 0; i < s; ++i) lane[i] = std::max(lane[i], lane[i + s]);
  return lane[0];
}

// Whether any lane of a comparison holds.
inline bool any(Int holds) {
#if FORETELL_AVX512
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#else
  int32_t lane[kLanes], found = 0;
  store(lane, holds);
  for (int i = 0; i < kLanes; ++i) found |= lane[i];
  return found != 0;
#endif
}

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds a float to the nearest integer

// e^x to about 2 units in the last place; exactly 0 below -87, so that masked scores vanish.
inline Float exponential(Float x) {
  const Float clipped = smaller(larger(x, splat(-87.0f)), splat(88.0f));
  const Float rounded = fma(clipped, splat(1.44269504f), splat(kRounder));
  const Float n = rounded - splat(kRounder);
  Float r = fma(n, splat(-0.693359375f), clipped);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, splat(2.12194440e-4f), r);
  Float p = splat(1.0f / 5040);  // Taylor series of e^r for |r| <= ln(2) / 2
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  const Int exponent = ((Int)rounded - splat((int32_t)0x4B400000)) << 23;
  return x < splat(-87.0f) ? Float{} : (Float)((Int)p + exponent);
}

inline Float tanh_of(Float x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exponential(x + x)); }

inline Float activate(Float x, int32_t kind) {
  if (kind == kSilu) return x / (splat(1.0f) + exponential(-x));
  const Float cubic = fma(x * x * x, splat(0.044715f), x);
  return splat(0.5f) * x * (splat(1.0f) + tanh_of(splat(0.7978845608f) * cubic));
}

// GELU with the error function itself, to about 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Float gelu(Float x) {
  const Float z = larger(x, -x) * splat(0.70710678f), t = splat(1.0f) / fma(z, splat(0.3275911f), splat(1.0f));
  Float p = splat(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, splat(c));
  const Float tail = splat(0.5f) * p * t * exponential(-z * z);
  return x * (x < Float{} ? tail : splat(1.0f) - tail);
}

// Step S of a 16 x 16 transposition: exchanges the off-diagonal S x S blocks of the rows a = i and b = i + S.
template <int S, size_t... L>
inline void exchange(Word& a, Word& b, std::index_sequence<L...>) {
  const Word low = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L - S : L)...);
  b = __builtin_shufflevector(a, b, ((L & S) ? kLanes + L : L + S)...);
  a = low;
}

template <int S>
inline void exchange_all(Word* r) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) exchange<S>(r[i], r[i + S], std::make_index_sequence<kLanes>());
}

inline void transpose(Word* r) { exchange_all<8>(r), exchange_all<4>(r), exchange_all<2>(r), exchange_all<1>(r); }

// ---- Precisions: how numbers become words, and what one step of an inner product does. ----

struct Float32 {
  static constexpr int kDepth = 1;  // numbers in a word
  static Float step(Float acc, Word w, Word x) { return fma((Float)w, (Float)x, acc); }
  // kDepth rows of words to kDepth vectors whose words hold the same number of each row.
  static void zip(const Word* rows, Word* columns) { columns[0] = rows[0]; }
  // Puts sums over such columns back in order.
  static void unravel(const Float* acc, Float* out) { out[0] = acc[0]; }
  // n numbers from x, which is zero up to a multiple of 32, into words.
  static void pack(const float* x, int n, uint32_t* words) { std::memcpy(words, x, 4 * (size_t)n); }
};

struct Bfloat16 {
  static constexpr int kDepth = 2;
  static Float even(Word w) { return (Float)(w << 16); }
  static Float odd(Word w) { return (Float)(w & splat(0xFFFF0000u)); }
  static Float step(Float acc, Word w, Word x) {
#if FORETELL_BF16
    return (Float)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
#else
    return fma(odd(w), odd(x), fma(even(w), even(x), acc));
#endif
  }
  static void zip(const Word* rows, Word* columns) {
    columns[0] = (rows[0] & splat(0xFFFFu)) | rows[1] << 16;
    columns[1] = rows[0] >> 16 | (rows[1] & splat(0xFFFF0000u));
  }
  static uint32_t round(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
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
  template <int Half, size_t... L>
  static Float interleave(Float a, Float b, std::index_sequence<L...>) {
    return __builtin_shufflevector(a, b, (L / 2 + Half * (kLanes / 2) + (L % 2 ? kLanes : 0))...);
  }
  static void unravel(const Float* acc, Float* out) {
    constexpr auto lanes = std::make_index_sequence<kLanes>();
    out[0] = interleave<0>(acc[0], acc[1], lanes);
    out[1] = interleave<1>(acc[0], acc[1], lanes);
  }
};

// What a product brings into the second-level cache while its arithmetic runs. Few tokens wait for memory anyway, and the processor
// fetches ahead by itself: half of what is read a page later helps it to start on that page (kHalf). More tokens need all of what
// they read soon, over the page's end, where the processor stops (kAhead), or half of the panel that comes next (kNext).
enum class Fetch { kHalf, kAhead, kNext };

// For step k of a panel: two lines are what a step reads, and 32 steps a page.
template <Fetch kFetch>
inline void fetch(const uint32_t* panel, const char* next, int k) {
  constexpr int kPage = 32, kSoon = 48;
  if (kFetch == Fetch::kHalf) __builtin_prefetch(panel + kPanel * (k + kPage), 0, 2);
  if (kFetch == Fetch::kAhead)
    for (int line = 0; line < 2; ++line) __builtin_prefetch(panel + kPanel * (k + kSoon) + kLanes * line, 0, 2);
  if (kFetch == Fetch::kNext) __builtin_prefetch(next + 128 * k, 0, 2);
}

// Products of float32 and bfloat16: one accumulator per output and token, from the first input to the last.
template <class P>
struct FloatProduct {
  using Cached = P;                       // precision of keys and values
  static constexpr int kMostTokens = 12;  // 24 accumulators, 2 weights: what 32 registers hold
  static constexpr int kFewTokens = 2;    // so many wait for memory more than they work
  static size_t row_words(int in) { return ((size_t)in + P::kDepth - 1) / P::kDepth; }
  static size_t panel_words(int in) { return row_words(in) * kPanel; }

  static void quantize(float* x, int in, uint32_t* row) { P::pack(x, (in + P::kDepth - 1) / P::kDepth * P::kDepth, row); }

  // out[2 * t], out[2 * t + 1] = the panel's 32 outputs for token t.
  template <int T, Fetch kFetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    Float acc[2 * T] = {};
    const int steps = (int)row_words(in);
    for (int k = 0; k < steps; ++k) {
      fetch<kFetch>(panel, next, k);
      const Word w0 = load<Word>(panel + kPanel * k), w1 = load<Word>(panel + kPanel * k + kLanes);
      for (int t = 0; t < T; ++t) {
        const Word word = splat(x[t * stride + k]);
        acc[2 * t] = P::step(acc[2 * t], w0, word);
        acc[2 * t + 1] = P::step(acc[2 * t + 1], w1, word);
      }
    }
    for (int i = 0; i < 2 * T; ++i) out[i] = acc[i];
  }
};

// Products of int8 weights and int8 activations, each with one scale per group of inputs.
//
// Both sides are first rotated by the same orthonormal Hadamard matrix over blocks of 64 inputs, which leaves the product
// as it is but spreads a block's outliers over all of it (as in QuaRot, arXiv 2404.00456): on SmolLM2-135M the
// divergence from float32 falls to a quarter. The instruction wants unsigned times signed bytes; the weights are stored
// plus 128 and a row carries, per group, its scale and what that adds: -128 times the sum of its bytes.
struct Int8 {
  using Cached = Bfloat16;
  static constexpr int kBlock = 64;
  static constexpr int kGroup = 192;
  static constexpr int kMostTokens = 8;
  static constexpr int kFewTokens = 4;
  static int padded(int in) { return (in + kBlock - 1) / kBlock * kBlock; }
  static int groups(int in) { return (in + kGroup - 1) / kGroup; }
  static size_t row_words(int in) { return padded(in) / 4 + 2 * (size_t)groups(in); }
  static size_t panel_words(int in) { return kPanel * (size_t)(padded(in) / 4 + groups(in)); }

  static Int step(Int acc, Word w, Word x) {
#if FORETELL_VNNI
    return (Int)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#else
    for (int i = 0; i < 32; i += 8) acc += (Int)((w >> i) & splat(0xFFu)) * ((Int)(x << (24 - i)) >> 24);
    return acc;
#endif
  }

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
    v = fma(v, sign, __builtin_shufflevector(v, v, (L ^ S)...));
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
      typedef int8_t Bytes __attribute__((vector_size(16)));
      const Float rounded = fma(load<Float>(x + i), splat(inverse), splat(kRounder));
      const Int number = (Int)rounded - splat((int32_t)0x4B400000);
      total += number;
      const Bytes bytes = __builtin_convertvector(number, Bytes);
      std::memcpy(row + i / 4, &bytes, sizeof bytes);
    }
    int32_t correction = 0;
    for (int i = 0; i < kLanes; ++i) correction -= 128 * total[i];
    std::memcpy(row + count / 4, &scale, 4);
    std::memcpy(row + count / 4 + 1, &correction, 4);
    return row + count / 4 + 2;
  }

  template <int T, Fetch kFetch>
  static void tile(const uint32_t* panel, const uint32_t* x, size_t stride, int in, const char* next, Float* out) {
    for (int i = 0; i < 2 * T; ++i) out[i] = Float{};
    for (int left = padded(in) / 4; left > 0; left -= kGroup / 4) {
      const int steps = std::min(kGroup / 4, left);
      Int part[2 * T];
      for (int t = 0; t < T; ++t) part[2 * t] = part[2 * t + 1] = splat((int32_t)x[t * stride + steps + 1]);
      for (int k = 0; k < steps; ++k) {
        fetch<kFetch>(panel, next, k);
        const Word w0 = load<Word>(panel + kPanel * k), w1 = load<Word>(panel + kPanel * k + kLanes);
        for (int t = 0; t < T; ++t) {
          const Word word = splat(x[t * stride + k]);
          part[2 * t] = step(part[2 * t], w0, word);
          part[2 * t + 1] = step(part[2 * t + 1], w1, word);
        }
      }
      fetch<kFetch>(panel, next, steps);  // there are scales in step with the weights
      const Float s0 = load<Float>(panel + kPanel * steps), s1 = load<Float>(panel + kPanel * steps + kLanes);
      for (int t = 0; t < T; ++t) {
        const Float scale = (Float)splat(x[t * stride + steps]);
        out[2 * t] = fma(__builtin_convertvector(part[2 * t], Float), s0 * scale, out[2 * t]);
        out[2 * t + 1] = fma(__builtin_convertvector(part[2 * t + 1], Float), s1 * scale, out[2 * t + 1]);
      }
      panel += kPanel * (steps + 1);
      next += 128 * (steps + 1);
      x += steps + 2;
    }
  }
};

// ---- Threads and memory. ----

// Where the threads of a pass wait for each other, some two hundred times. OpenMP's own barrier spins for milliseconds: on a
// machine with other work, two threads that share a core then take turns at that pace. This one gives way at once.
class Gate {
 public:
  void wait(int threads) {
    const int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < kPatience)
        rest();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kPatience = 2000;  // some tens of microseconds: longer than threads of equal work differ
  static void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::atomic<int> arrived_{0}, turn_{0};
};

struct Team {
  int thread = 0, threads = 1;
  Gate* gate = nullptr;
  static Team current(Gate& gate) {
    Team team;
    team.gate = &gate;
#ifdef _OPENMP
    team.thread = omp_get_thread_num(), team.threads = omp_get_num_threads();
#endif
    return team;
  }
  void barrier() const {
    if (threads > 1) gate->wait(threads);
  }
  // This thread's share of n things.
  std::pair<int, int> share(int n) const {
    return {(int)((int64_t)n * thread / threads), (int)((int64_t)n * (thread + 1) / threads)};
  }
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> buffer(size_t count) {
  return Buffer<T>((T*)std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64));
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// ---- Linear layers. ----

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

// What becomes of a product: stored, added to what is there, or gated: activation(first half) * second half.
enum class Then { kStore, kAdd, kGate };

struct Sink {
  float* y;
  int stride;
  int width;  // numbers per row that exist in y
  Then then;
  int32_t activation;
};

void emit(const Sink& sink, const Weight& w, const Float* tile, int panel, int token) {
  Float v[2] = {tile[0], tile[1]};
  if (w.bias)
    for (int i = 0; i < 2; ++i) v[i] += load<Float>(w.bias + kPanel * panel + kLanes * i);
  float* row = sink.y + (size_t)token * sink.stride;
  if (sink.then == Then::kGate) {
    store_part(row + kLanes * panel, activate(v[0], sink.activation) * v[1], sink.width - kLanes * panel);
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int first = kPanel * panel + kLanes * i, left = sink.width - first;
    if (left <= 0) return;
    if (sink.then == Then::kAdd) v[i] += load_part<Float>(row + first, left);
    store_part(row + first, v[i], left);
  }
}

using Tile = void (*)(const uint32_t*, const uint32_t*, size_t, int, const char*, Float*);

template <class P, Fetch kFetch, size_t... T>
Tile tile_of(int tokens, std::index_sequence<T...>) {
  constexpr Tile all[] = {P::template tile<T + 1, kFetch>...};
  return all[tokens - 1];
}

template <class P, Fetch kFetch>
Tile pick_tile(int tokens) {
  return tile_of<P, kFetch>(tokens, std::make_index_sequence<P::kMostTokens>());
}

const uint32_t* first_panel(const Weight& w, size_t panel_words, const Team& team) {
  return w.words + team.share((w.out + kPanel - 1) / kPanel).first * panel_words;
}

// y = x W^T for this thread's panels. A panel stays in the cache while all tokens pass by it in blocks. Two blocks fetch half of the
// next panel's lines each (at the end: of the first of the layer that follows).
template <class P>
void multiply(const Weight& w, const uint32_t* x, int tokens, const Sink& sink, const Weight* following, const Team& team) {
  const size_t stride = P::row_words(w.in), panel_words = P::panel_words(w.in);
  const auto [from, to] = team.share((w.out + kPanel - 1) / kPanel);
  const int blocks = (tokens + P::kMostTokens - 1) / P::kMostTokens;
  const auto pick = tokens <= P::kFewTokens ? pick_tile<P, Fetch::kHalf>
                    : blocks == 2           ? pick_tile<P, Fetch::kNext>
                                            : pick_tile<P, Fetch::kAhead>;
  Float out[2 * P::kMostTokens];
  for (int p = from; p < to; ++p) {
    const uint32_t* panel = w.words + p * panel_words;
    const uint32_t* next = p + 1 < to ? panel + panel_words : following ? first_panel(*following, P::panel_words(following->in), team) : panel;
    for (int b = 0, t = 0; b < blocks; ++b) {
      const int count = (tokens - t + blocks - b - 1) / (blocks - b);
      pick(count)(panel, x + t * stride, stride, w.in, (const char*)next + 64 * b, out);
      for (int i = 0; i < count; ++i) emit(sink, w, out + 2 * i, p, t + i);
      t += count;
    }
  }
}

// Rows as a product wants them: normed if asked, rounded to the precision.
template <class P>
class Operands {
 public:
  Operands(int tokens, int widest, const Team& team)
      : alone_(tokens <= kAlone),
        tokens_(tokens),
        words_(buffer<uint32_t>((size_t)tokens * (alone_ ? team.threads : 1) * P::row_words(widest))),
        row_size_((size_t)round_up(widest, 64)),
        rows_(buffer<float>(team.threads * row_size_)) {}

  // Every thread prepares its share and waits for the others, or, where that is quicker than waiting, all for itself.
  const uint32_t* prepare(const float* x, int in, int x_stride, const float* norm, float eps, const Team& team) const {
    const size_t stride = P::row_words(in);
    const auto [from, to] = alone_ ? std::pair(0, tokens_) : team.share(tokens_);
    uint32_t* words = words_.get() + (alone_ ? team.thread * tokens_ * stride : 0);
    float* row = rows_.get() + team.thread * row_size_;
    for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
    for (int t = from; t < to; ++t) {
      const float* source = x + (size_t)t * x_stride;
      if (norm)
        normalize(source, in, norm, eps, row);
      else
        std::memcpy(row, source, 4 * (size_t)in);
      P::quantize(row, in, words + t * stride);
      for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
    }
    if (!alone_) team.barrier();
    return words;
  }

 private:
  static constexpr int kAlone = 4;
  const bool alone_;
  const int tokens_;
  const Buffer<uint32_t> words_;
  const size_t row_size_;
  const Buffer<float> rows_;
};

// ---- What each token sees. ----

// A token's visible keys in the order of the text, `length` in all: slots 0 .. run - 1, then those listed in `extra`.
struct View {
  int32_t length, run;
  const int32_t* extra;
  int slot(int index) const { return index < run ? index : extra[index - run]; }
};

View view_of(const Tokens& tokens, int token) {
  const int32_t* extra = tokens.extra + (size_t)token * tokens.extras;
  int count = 0;
  while (count < tokens.extras && extra[count] >= 0) ++count;
  return {tokens.prefix[token] + count, tokens.prefix[token], extra};
}

class Sight {
 public:
  explicit Sight(const Tokens& tokens) : tokens_(tokens), views_(buffer<View>((size_t)tokens.count)) {
    for (int i = 0; i < tokens.count; ++i) views_[(size_t)i] = view_of(tokens, i);
  }
  const View& operator[](int token) const { return views_[(size_t)token]; }
  int longest() const {
    int length = 0;
    for (int i = 0; i < tokens_.count; ++i) length = std::max(length, (*this)[i].length);
    return length;
  }
  const Tokens& tokens() const { return tokens_; }

 private:
  const Tokens& tokens_;
  const Buffer<View> views_;
};

// ---- Attention. ----

constexpr int kMostQueries = 12;  // in one tile of scores
constexpr int kMostShared = 16;   // tokens that share the reading of keys

// out[i] = products of query i with the 16 keys whose transposed words are given.
template <class C, int Q>
void score(const Word* keys, int words, const uint32_t* const* queries, Float* out) {
  Float acc[Q] = {};
  for (int w = 0; w < words; ++w)
    for (int i = 0; i < Q; ++i) acc[i] = C::step(acc[i], keys[w], splat(queries[i][w]));
  for (int i = 0; i < Q; ++i) out[i] = acc[i];
}

template <class C, size_t... Q>
void score_all(const Word* keys, int words, const uint32_t* const* queries, int count, Float* out, std::index_sequence<Q...>) {
  using Score = void (*)(const Word*, int, const uint32_t* const*, Float*);
  constexpr Score all[] = {score<C, Q + 1>...};
  for (int i = 0; i < count; i += kMostQueries)
    all[std::min(kMostQueries, count - i) - 1](keys, words, queries + i, out + i);
}

// One half of a decoder block: everything between the product with qkv and the product with the output matrix.
template <class C>
class Attention {
 public:
  Attention(const Model& model, const Sight& sight, const Cache& cache, const Team& team)
      : m_(model),
        sight_(sight),
        cache_(cache),
        words_(model.head_dim / C::kDepth),
        group_(model.heads / model.kv_heads),
        span_((size_t)round_up(sight.longest(), kLanes)),
        together_(tokens_together()),
        queries_(buffer<uint32_t>((size_t)sight.tokens().count * model.heads * words_)),
        keys_size_((size_t)round_up(words_, kLanes)),
        keys_(buffer<Word>(team.threads * keys_size_)),
        scores_(buffer<float>((size_t)team.threads * together_ * group_ * span_)),
        head_(buffer<float>((size_t)team.threads * model.head_dim)) {}

  // Norms and rotates queries and keys; keys and values go to the cache, queries wait.
  void place(const Layer& layer, int index, const float* qkv, const Team& team) const {
    const int heads = m_.heads + 2 * m_.kv_heads;
    const auto [from, to] = team.share(sight_.tokens().count * heads);
    for (int i = from; i < to; ++i) place_head(layer, index, i / heads, i % heads, qkv + (size_t)i * m_.head_dim, team);
  }

  // out [tokens, heads * head_dim]. A thread's share of a row is a run of (key-value head, token) pairs, so that few keys and values
  // are read by two threads; tokens weigh what they see.
  void attend(const Layer& layer, int index, float* out, const Team& team) const {
    const Tokens& tokens = sight_.tokens();
    for (int first = 0, end = 0; first < tokens.count; first = end) {
      int64_t seen = 0;
      for (; end < tokens.count && tokens.row[end] == tokens.row[first]; ++end) seen += sight_[end].length;
      const int64_t all = seen * m_.kv_heads, from = all * team.thread / team.threads, to = all * (team.thread + 1) / team.threads;
      for (int kv = 0; kv < m_.kv_heads; ++kv) {
        int t = after(first, end, from - kv * seen);
        for (const int last = after(first, end, to - kv * seen); t < last; t += together_)
          attend_some(layer, index, kv, t, std::min(t + together_, last), out, team);
      }
    }
  }

 private:
  // As many as share the reading of keys, and leave their scores in the second-level cache.
  int tokens_together() const { return std::max(1, std::min((int)(65536 / (group_ * span_)), kMostShared)); }

  // The first of some tokens before which `seen` keys or more are seen by the others.
  int after(int first, int end, int64_t seen) const {
    for (; first < end && seen > 0; ++first) seen -= sight_[first].length;
    return first;
  }

  size_t head_at(int index, int row, int kv) const {
    return (((size_t)index * cache_.rows + row) * m_.kv_heads + kv) * cache_.slots * words_;
  }

  void place_head(const Layer& layer, int index, int token, int head, const float* source, const Team& team) const {
    const Tokens& tokens = sight_.tokens();
    const int dim = m_.head_dim, half = dim / 2;
    float* x = head_.get() + (size_t)team.thread * dim;
    std::memcpy(x, source, 4 * (size_t)dim);
    if (head < m_.heads + m_.kv_heads) {
      const float* norm = head < m_.heads ? layer.q_norm : layer.k_norm;
      if (norm) normalize(x, dim, norm, m_.eps, x);
      const float *cos = layer.cos + (size_t)tokens.position[token] * half, *sin = layer.sin + (size_t)tokens.position[token] * half;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
      }
    }
    if (head < m_.heads) {
      C::pack(x, dim, queries_.get() + ((size_t)token * m_.heads + head) * words_);
      return;
    }
    const int kv = (head - m_.heads) % m_.kv_heads;
    uint32_t* side = head < m_.heads + m_.kv_heads ? cache_.k : cache_.v;
    C::pack(x, dim, side + head_at(index, tokens.row[token], kv) + (size_t)tokens.slot[token] * words_);
  }

  int first_visible(const Layer& layer, int token) const {
    return layer.window ? std::max(0, sight_[token].length - layer.window) : 0;
  }

  float* scores_of(int i, const Team& team) const {
    return scores_.get() + ((size_t)team.thread * together_ * group_ + i) * span_;
  }

  // Tokens first .. last - 1, all of one row, and the query heads that read one key-value head.
  void attend_some(const Layer& layer, int index, int kv, int first, int last, float* out, const Team& team) const {
    const size_t at = head_at(index, sight_.tokens().row[first], kv);
    int most = 0;
    for (int t = first; t < last; ++t) most = std::max(most, shared_blocks(t));
    for (int block = 0; block < most; ++block) score_shared(layer, at, kv, first, last, block, team);
    for (int t = first; t < last; ++t)
      for (int block = shared_blocks(t); block * kLanes < sight_[t].length; ++block)
        score_block(layer, at, kv, t, block, (t - first) * group_, team);
    Query queries[kMostMixed];
    int count = 0;
    for (int t = first; t < last; ++t)
      for (int h = 0; h < group_; ++h) {
        float* scores = scores_of((t - first) * group_ + h, team);
        const float factor = soften(layer, t, scores);
        const Query query = {t, first_visible(layer, t), (const uint32_t*)scores, factor, out + ((size_t)t * m_.heads + kv * group_ + h) * m_.head_dim};
        if (count == kMostMixed || (count && query.from != queries[0].from)) mix_all(cache_.v + at, queries, std::exchange(count, 0));
        queries[count++] = query;
      }
    mix_all(cache_.v + at, queries, count);
  }

  // Blocks of 16 visible keys that lie in the cache in their own order, so that other tokens see the same ones there.
  int shared_blocks(int token) const {
    const View& view = sight_[token];
    return view.run == view.length ? (view.run + kLanes - 1) / kLanes : view.run / kLanes;
  }

  // Words of 16 keys, transposed: one vector per word. slots(i) says where key i lies.
  template <class Slots>
  const Word* fetch_keys(size_t at, const Slots& slots, const Team& team) const {
    Word* keys = keys_.get() + team.thread * keys_size_;
    for (int w = 0; w < words_; w += kLanes) {
      for (int i = 0; i < kLanes; ++i) keys[w + i] = load_part<Word>(cache_.k + at + (size_t)slots(i) * words_ + w, words_ - w);
      transpose(keys + w);
    }
    return keys;
  }

  // Brings the keys or values of a block into the second-level cache.
  void soon(const uint32_t* first, int block) const {
    const char* at = (const char*)(first + (size_t)block * kLanes * words_);
    for (int i = 0; i < kLanes * words_ * 4; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  void score_shared(const Layer& layer, size_t at, int kv, int first, int last, int block, const Team& team) const {
    const uint32_t* queries[kMostShared * kMostGroup];
    int owners[kMostShared], count = 0;
    for (int t = first; t < last; ++t)
      if (block < shared_blocks(t) && (block + 1) * kLanes > first_visible(layer, t)) owners[count++] = t;
    if (!count) return;
    for (int o = 0, i = 0; o < count; ++o)
      for (int h = 0; h < group_; ++h) queries[i++] = query(owners[o], kv, h);
    soon(cache_.k + at, block + 2), soon(cache_.v + at, block);
    // Slots past the end of the cache stand for keys that nobody sees.
    const Word* keys = fetch_keys(at, [&](int i) { return std::min(block * kLanes + i, cache_.slots - 1); }, team);
    Float out[kMostShared * kMostGroup];
    score_all<C>(keys, words_, queries, count * group_, out, std::make_index_sequence<kMostQueries>());
    for (int o = 0, i = 0; o < count; ++o)
      for (int h = 0; h < group_; ++h, ++i)
        store(scores_of((owners[o] - first) * group_ + h, team) + block * kLanes, finish(layer, owners[o], block, out[i]));
  }

  void score_block(const Layer& layer, size_t at, int kv, int token, int block, int scores, const Team& team) const {
    if ((block + 1) * kLanes <= first_visible(layer, token)) return;
    const int end = sight_[token].length - 1;
    const uint32_t* queries[kMostGroup];
    for (int h = 0; h < group_; ++h) queries[h] = query(token, kv, h);
    const Word* keys = fetch_keys(at, [&](int i) { return sight_[token].slot(std::min(block * kLanes + i, end)); }, team);
    Float out[kMostGroup];
    score_all<C>(keys, words_, queries, group_, out, std::make_index_sequence<kMostQueries>());
    for (int h = 0; h < group_; ++h) store(scores_of(scores + h, team) + block * kLanes, finish(layer, token, block, out[h]));
  }

  const uint32_t* query(int token, int kv, int h) const {
    return queries_.get() + ((size_t)token * m_.heads + kv * group_ + h) * words_;
  }

  // Scales scores and hides those of keys outside the token's view.
  Float finish(const Layer& layer, int token, int block, Float score) const {
    score *= splat(m_.scale);
    if (m_.softcap > 0) score = splat(m_.softcap) * tanh_of(score / splat(m_.softcap));
    const Int place = kIota + splat((int32_t)(block * kLanes));
    const Int visible = (place >= splat((int32_t)first_visible(layer, token))) & (place < splat(sight_[token].length));
    return visible ? score : splat(-INFINITY);
  }

  // Scores to words of e^(score - largest), in place; returns the reciprocal of their sum.
  float soften(const Layer& layer, int token, float* scores) const {
    const int from = first_visible(layer, token) / kLanes * kLanes, to = sight_[token].length;
    Float most = splat(-INFINITY), total = {};
    for (int i = from; i < to; i += kLanes) most = larger(most, load<Float>(scores + i));
    const Float top = splat(largest(most));
    for (int i = from; i < to; i += kLanes) {
      float e[kLanes];
      store(e, exponential(load<Float>(scores + i) - top));
      total += load<Float>(e);
      C::pack(e, kLanes, (uint32_t*)scores + i / C::kDepth);
    }
    return 1 / sum(total);
  }

  // y = sum of a token's visible values from `from` on, weighted with the words of `weights`, times `factor`.
  struct Query {
    int token, from;
    const uint32_t* weights;
    float factor;
    float* y;
  };

  // Two vectors of a value's words, in turns the numbers of as many values as a word of weights holds.
  struct Columns {
    Word word[2][C::kDepth];
  };

  template <class Value>
  Columns columns(const Value& value, int w) const {
    Columns out;
    for (int half = 0; half < 2; ++half) {
      const int first = w + kLanes * half;
      Word rows[C::kDepth];
      for (int d = 0; d < C::kDepth; ++d) rows[d] = first < words_ ? load_part<Word>(value(d) + first, words_ - first) : Word{};
      C::zip(rows, out.word[half]);
    }
    return out;
  }

  struct Sums {  // over such columns
    Float of[2][C::kDepth];
    void add(const Columns& values, uint32_t weight) {
      for (int half = 0; half < 2; ++half)
        for (int d = 0; d < C::kDepth; ++d) of[half][d] = C::step(of[half][d], values.word[half][d], splat(weight));
    }
  };

  // Some queries that begin at the same key. They share the reading of values while these lie in the cache in their own order.
  // Written out by query, since sums stay in registers only where every index is a constant.
  template <size_t... Q>
  void mix(const uint32_t* values, const Query* queries, std::index_sequence<Q...>) const {
    constexpr int D = C::kDepth;
    const int shared = std::min({sight_[queries[Q].token].run...}) / D;
    for (int w = 0; w < words_; w += 2 * kLanes) {
      Sums sums[sizeof...(Q)] = {};
      int i = queries[0].from / D;
      for (const uint32_t* value = values + (size_t)i * D * words_; i < shared; ++i, value += D * words_) {
        const Columns read = columns([&](int d) { return value + d * words_; }, w);
        (sums[Q].add(read, queries[Q].weights[i]), ...);
      }
      (finish_mix(values, queries[Q], i, w, sums[Q]), ...);
    }
  }

  // Adds what a query sees from word i of its weights on; what lies past its view weighs nothing.
  void finish_mix(const uint32_t* values, const Query& query, int i, int w, Sums sums) const {
    constexpr int D = C::kDepth;
    const View view = sight_[query.token];
    for (; i * D < view.length; ++i) {
      const auto value = [&](int d) { return values + (size_t)view.slot(std::min(i * D + d, view.length - 1)) * words_; };
      sums.add(columns(value, w), query.weights[i]);
    }
    for (int half = 0; half < 2; ++half) {
      Float ordered[D];
      C::unravel(sums.of[half], ordered);
      for (int d = 0; d < D; ++d) {
        const int first = (w + kLanes * half) * D + kLanes * d;
        if (first < m_.head_dim) store_part(query.y + first, ordered[d] * splat(query.factor), m_.head_dim - first);
      }
    }
  }

  template <size_t... N>
  void mix_some(const uint32_t* values, const Query* queries, int count, std::index_sequence<N...>) const {
    ((count == (int)N + 1 ? mix(values, queries, std::make_index_sequence<N + 1>()) : void()), ...);
  }
  void mix_all(const uint32_t* values, const Query* queries, int count) const {
    mix_some(values, queries, count, std::make_index_sequence<kMostMixed>());
  }

  static constexpr int kMostMixed = 6;   // queries that share the reading of values: what the registers hold
  static constexpr int kMostGroup = 16;  // query heads per key-value head
  const Model& m_;
  const Sight& sight_;
  const Cache& cache_;
  const int words_, group_;
  const size_t span_;
  const int together_;
  const Buffer<uint32_t> queries_;
  const size_t keys_size_;
  const Buffer<Word> keys_;
  const Buffer<float> scores_;
  const Buffer<float> head_;
};

// ---- The decoder. ----

template <class P>
class Pass {
 public:
  Pass(const Model& model, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens,
       const Cache& cache, const Team& team)
      : m_(model),
        layers_(layers),
        first_(first),
        last_(last),
        x_(x),
        entry_(entry),
        tokens_(tokens.count),
        qkv_width_((model.heads + 2 * model.kv_heads) * model.head_dim),
        ffn_(round_up(model.ffn, kLanes)),
        sight_(tokens),
        attention_(model, sight_, cache, team),
        operands_(tokens.count, std::max({layers[first].qkv.in, model.hidden, model.heads * model.head_dim, ffn_}), team),
        qkv_(buffer<float>((size_t)tokens.count * qkv_width_)),
        inner_(buffer<float>((size_t)tokens.count * std::max(ffn_, model.heads * model.head_dim))),
        product_(buffer<float>((size_t)tokens.count * model.hidden)) {}

  // What every thread runs.
  void run(const Taps& taps, const Team& team) const {
    for (int i = first_, tap = 0; i < last_; ++i) {
      if (tap < taps.count && taps.layer[tap] == i) note(taps.out + (size_t)tap++ * tokens_ * m_.hidden, team);
      if (layers_[i].attention) attend(i, team);
      if (layers_[i].mlp) feed_forward(i, team);
    }
  }

 private:
  // Copies the stream. Nobody changes it before all threads have come to the next barrier.
  void note(float* out, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    std::memcpy(out + (size_t)from * m_.hidden, x_ + (size_t)from * m_.hidden, 4 * (size_t)(to - from) * m_.hidden);
  }

  void attend(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const bool entering = entry_ && i == first_;
    linear(entering ? entry_ : x_, entering ? layer.qkv.in : m_.hidden, entering ? nullptr : layer.attention_norm, layer.qkv,
           {qkv_.get(), qkv_width_, qkv_width_, Then::kStore, 0}, &layer.output, team);
    attention_.place(layer, i, qkv_.get(), team);
    team.barrier();
    attention_.attend(layer, i, inner_.get(), team);
    team.barrier();
    join(m_.heads * m_.head_dim, layer.output, layer.post_attention_norm, &layer.gate_up, team);
  }

  void feed_forward(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    linear(x_, m_.hidden, layer.mlp_norm, layer.gate_up, {inner_.get(), ffn_, ffn_, Then::kGate, m_.activation}, &layer.down, team);
    join(ffn_, layer.down, layer.post_mlp_norm, i + 1 < last_ ? &layers_[i + 1].qkv : nullptr, team);
  }

  void linear(const float* x, int stride, const float* norm, const Weight& w, const Sink& sink, const Weight* next, const Team& team) const {
    const uint32_t* words = operands_.prepare(x, w.in, stride, norm, m_.eps, team);
    multiply<P>(w, words, tokens_, sink, next, team);
    team.barrier();
  }

  // Adds a product of what the inner part left, normed if asked, to the residual stream.
  void join(int stride, const Weight& w, const float* norm, const Weight* next, const Team& team) const {
    float* y = norm ? product_.get() : x_;
    linear(inner_.get(), stride, nullptr, w, {y, m_.hidden, m_.hidden, norm ? Then::kStore : Then::kAdd, 0}, next, team);
    if (!norm) return;
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float *row = y + (size_t)t * m_.hidden, *residual = x_ + (size_t)t * m_.hidden;
      normalize(row, m_.hidden, norm, m_.eps, row);
      for (int i = 0; i < m_.hidden; ++i) residual[i] += row[i];
    }
    team.barrier();
  }

  const Model& m_;
  const Layer* layers_;
  const int first_, last_;
  float* x_;
  const float* entry_;
  const int tokens_, qkv_width_, ffn_;
  const Sight sight_;
  const Attention<typename P::Cached> attention_;
  const Operands<P> operands_;
  const Buffer<float> qkv_, inner_, product_;
};

template <class P>
void run_stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens,
               const Cache& cache, const Taps& taps, int threads) {
  const Pass<P> pass(m, layers, first, last, x, entry, tokens, cache, {0, threads});
  Gate gate;
#pragma omp parallel num_threads(threads)
  pass.run(taps, Team::current(gate));
}

template <class P>
void run_linear(const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  const Operands<P> operands(tokens, w.in, {0, threads});
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    const uint32_t* words = operands.prepare(x, w.in, w.in, nullptr, 0, team);
    multiply<P>(w, words, tokens, {y, width, width, Then::kStore, 0}, nullptr, team);
  }
}

// One stage: next [tokens, e] = gelu(norm(project state + token embedded)), logits [tokens, width] = head (output next).
template <class P>
void run_stage(const Stage& s, const float* state, const float* embedded, float* next, float* logits, int tokens, int threads) {
  const int inner = s.project.out, reading = s.output.out;
  const Team all = {0, threads};
  const Operands<P> first(tokens, s.project.in, all), second(tokens, s.token.in, all), third(tokens, inner, all), last(tokens, reading, all);
  const Buffer<float> read = buffer<float>((size_t)tokens * reading);
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    const auto product = [&](const Operands<P>& operands, const float* x, const Weight& w, float* y, Then then, const Weight* coming) {
      const uint32_t* words = operands.prepare(x, w.in, w.in, nullptr, 0, team);
      multiply<P>(w, words, tokens, {y, w.out, w.out, then, 0}, coming, team);
    };
    product(first, state, s.project, next, Then::kStore, &s.token);
    // A thread adds to what it stored itself: both products have the same panels.
    product(second, embedded, s.token, next, Then::kAdd, &s.output);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t) {
      float* row = next + (size_t)t * inner;
      normalize(row, inner, s.norm_weight, s.eps, row);
      for (int i = 0; i < inner; i += kLanes)
        store_part(row + i, gelu(load_part<Float>(row + i, inner - i) + load_part<Float>(s.norm_bias + i, inner - i)), inner - i);
    }
    team.barrier();
    product(third, next, s.output, read.get(), Then::kStore, &s.head);
    team.barrier();
    product(last, read.get(), s.head, logits, Then::kStore, nullptr);
  }
}

// The embedding of a token, float32 [d].
void embed(const Embedding& e, int64_t token, int d, float* out) {
  const size_t at = (size_t)token * (size_t)d;
  for (int i = 0; i < d; ++i) {
    const uint32_t bits = e.halves ? (uint32_t)((const uint16_t*)e.table)[at + i] << 16 : ((const uint32_t*)e.table)[at + i];
    std::memcpy(out + i, &bits, 4);
    out[i] *= e.scale;
  }
}

// What the layers see of tokens that follow features: x [tokens, hidden] the residual stream, entry [tokens, 2 hidden] the normed
// embeddings and features side by side. Feature `parent[t]` belongs to token t; null: feature t.
void enter(const Model& m, const Entry& e, const int64_t* token, const float* features, const int64_t* parent, int tokens, float* x, float* entry,
           int threads) {
  const int d = m.hidden;
#pragma omp parallel for num_threads(threads) if (tokens > 16)
  for (int t = 0; t < tokens; ++t) {
    const float* feature = features + (size_t)(parent ? parent[t] : t) * d;
    float *embedded = entry + (size_t)t * 2 * d, *normed = embedded + d;
    embed(e.embedding, token[t], d, embedded);
    normalize(embedded, d, e.embedding_norm, m.eps, embedded);
    normalize(feature, d, e.feature_norm, m.eps, normed);
    std::memcpy(x + (size_t)t * d, e.normed ? normed : feature, 4 * (size_t)d);
  }
}

// The first token that points outside the cache or the rotary tables, or sees nothing; -1: all are well.
int first_bad_token(const Model& m, const Tokens& tokens, const Cache& cache) {
  const auto within = [](int32_t x, int32_t end) { return x >= 0 && x < end; };
  for (int i = 0; i < tokens.count; ++i) {
    const View view = view_of(tokens, i);
    bool good = within(tokens.row[i], cache.rows) && within(tokens.slot[i], cache.slots) &&
                within(tokens.position[i], m.context) && within(view.run, cache.slots + 1) && view.length > 0;
    for (int j = view.run; j < view.length; ++j) good = good && within(view.slot(j), cache.slots);
    if (!good) return i;
  }
  return -1;
}

void argmax_row(const float* x, int n, int64_t* out) {
  Float best = splat(-INFINITY);
  Int where = {};
  for (int i = 0; i < n; i += kLanes) {
    Float v = load_part<Float>(x + i, n - i);
    if (n - i < kLanes) v = kIota < splat(n - i) ? v : splat(-INFINITY);
    where = v > best ? kIota + splat(i) : where;
    best = larger(v, best);
  }
  const float most = largest(best);
  int32_t first = n;
  for (int i = 0; i < kLanes; ++i)
    if (best[i] == most) first = std::min(first, where[i]);
  *out = first;
}

// The k largest numbers of a row, descending; of equals the lower index first. Few blocks hold anything better than the
// worst one kept, so most cost one comparison.
void top_row(const float* x, int n, int k, float* values, int64_t* indices) {
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

// The k likeliest entries of a row of scores and their probabilities under its softmax, descending.
void likeliest_row(const float* x, int n, int k, float* chances, int64_t* indices) {
  top_row(x, n, k, chances, indices);
  const Float most = splat(chances[0]);
  Float total = {};
  for (int i = 0; i < n; i += kLanes) {
    const Float e = exponential(load_part<Float>(x + i, n - i) - most);
    total += kIota < splat(n - i) ? e : Float{};
  }
  const float all = sum(total);
  for (int i = 0; i < k; ++i) chances[i] = exponential(splat(chances[i]) - most)[0] / all;
}

// The k likeliest outputs of a linear layer for each row of x [tokens, in], which is normed first unless `norm` is null.
template <class P>
void run_guess(const Weight& w, const float* x, const float* norm, float eps, float* chances, int64_t* indices, int tokens, int k, int threads) {
  const Operands<P> operands(tokens, w.in, {0, threads});
  const Buffer<float> scores = buffer<float>((size_t)tokens * w.out);
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    const uint32_t* words = operands.prepare(x, w.in, w.in, norm, eps, team);
    multiply<P>(w, words, tokens, {scores.get(), w.out, w.out, Then::kStore, 0}, nullptr, team);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t)
      likeliest_row(scores.get() + (size_t)t * w.out, w.out, k, chances + (size_t)t * k, indices + (size_t)t * k);
  }
}

// Calls `run` with a Chosen of the product that a precision stands for.
template <class P>
struct Chosen {
  using Product = P;
};

template <class Run>
void in_precision(int32_t precision, const Run& run) {
  switch (precision) {
    case kFloat32: return run(Chosen<FloatProduct<Float32>>());
    case kBfloat16: return run(Chosen<FloatProduct<Bfloat16>>());
    case kInt8: return run(Chosen<Int8>());
  }
}

void guess(int32_t precision, const Weight& w, const float* x, const float* norm, float eps, float* chances, int64_t* indices, int tokens, int k,
           int threads) {
  in_precision(precision, [&](auto p) { run_guess<typename decltype(p)::Product>(w, x, norm, eps, chances, indices, tokens, k, threads); });
}

int32_t stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens, const Cache& cache,
              const Taps& taps, int threads) {
  const int bad = first_bad_token(m, tokens, cache);
  if (bad >= 0 || !tokens.count || first == last) return bad;
  in_precision(m.precision, [&](auto p) { run_stack<typename decltype(p)::Product>(m, layers, first, last, x, entry, tokens, cache, taps, threads); });
  return -1;
}

void linear(int32_t precision, const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  in_precision(precision, [&](auto p) { run_linear<typename decltype(p)::Product>(w, x, y, tokens, width, threads); });
}

// Row i of x [rows, width] is scaled by row i mod kinds of weight [kinds, width].
void norm_rows(const float* x, const float* weight, float eps, float* y, int rows, int width, int kinds, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 16)
  for (int i = 0; i < rows; ++i) normalize(x + (size_t)i * width, width, weight + (size_t)(i % kinds) * width, eps, y + (size_t)i * width);
}

// Features [count, hidden] from states [count, kinds, hidden].
Buffer<float> fused(const Model& m, const Entry& e, const float* states, int count, int threads) {
  Buffer<float> normed = buffer<float>((size_t)count * e.kinds * m.hidden), out = buffer<float>((size_t)count * m.hidden);
  if (e.state_norms) norm_rows(states, e.state_norms, m.eps, normed.get(), count * e.kinds, m.hidden, e.kinds, threads);
  linear(m.precision, e.fuse, e.state_norms ? normed.get() : states, out.get(), count, m.hidden, threads);
  return out;
}

int32_t eagle(const Model& m, const Layer* layers, int count, const Entry& e, const int64_t* token, const float* features, const int64_t* parent,
              float* x, const Tokens& tokens, const Cache& cache, int threads) {
  const Buffer<float> entry = buffer<float>((size_t)tokens.count * 2 * m.hidden);
  enter(m, e, token, features, parent, tokens.count, x, entry.get(), threads);
  return stack(m, layers, 0, count, x, entry.get(), tokens, cache, {nullptr, 0, nullptr}, threads);
}

// A tree that grows where the layers are confident; see shape/beam.py, which says the same for any drafter.
class Growth {
 public:
  struct Node {
    int64_t token;
    int parent, depth;
    double score;
    int64_t number;  // of its output among those of all nodes that were read
    int32_t slot;    // of its keys
  };

  Growth(const Beam& beam, int text, int64_t root) : beam_(beam), text_(text), nodes_{{root, -1, 0, 1.0, text, 0}} {}

  const Node& operator[](int i) const { return nodes_[(size_t)i]; }
  int length() const { return beam_.length ? (int)beam_.length[text_] : 0; }
  int row() const { return (int)beam_.row[text_]; }
  // Nodes to be gone on from at this level, the best first.
  const std::vector<int>& frontier() const { return frontier_; }
  double best() const { return frontier_.empty() ? 0 : (*this)[frontier_[0]].score; }
  bool grows(int level) const { return level < beam_.room[text_] && !frontier_.empty(); }

  // The node was read: its output has this number, its keys stand behind those of others.
  void read(int i, int64_t number) { nodes_[(size_t)i].number = number, nodes_[(size_t)i].slot = length() + drafted_++; }

  // Slots of a node and those above it, up to the root, which is part of the text.
  void path(int i, int32_t* slots) const {
    for (; i; i = (*this)[i].parent) slots[(*this)[i].depth - 1] = (*this)[i].slot;
  }

  // Children of the frontier, `count` for each node with their chances; the best of them are gone on from next.
  void add(const float* chances, const int64_t* tokens, int count) {
    struct Child {
      int64_t token;
      int parent;
      double score;
    };
    std::vector<Child> children;
    for (const int i : frontier_)
      for (int j = 0; j < count; ++j, ++chances, ++tokens) {
        const double score = (*this)[i].score * (double)*chances;
        if (score > 0 && score >= beam_.least) children.push_back({*tokens, i, score});
      }
    std::stable_sort(children.begin(), children.end(), [](const Child& a, const Child& b) { return a.score > b.score; });
    if ((int)children.size() > beam_.budget) children.resize((size_t)beam_.budget);
    frontier_.clear();
    for (const Child& child : children) {
      if ((int)frontier_.size() < beam_.width) frontier_.push_back((int)nodes_.size());
      nodes_.push_back({child.token, child.parent, (*this)[child.parent].depth + 1, child.score, -1, 0});
    }
  }

  // The best `budget` nodes below the root in the order in which they came, of equals the earlier; parents by their place among them
  // from 1 on, 0 the root. How many there are.
  int write(int64_t* token, int64_t* parent) const {
    std::vector<int> order(nodes_.size() - 1), place(nodes_.size(), 0);
    std::iota(order.begin(), order.end(), 1);
    if ((int)order.size() > beam_.budget) {
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return (*this)[a].score > (*this)[b].score; });
      order.resize((size_t)beam_.budget);
      std::sort(order.begin(), order.end());
    }
    for (size_t i = 0; i < order.size(); ++i) {
      place[(size_t)order[i]] = (int)i + 1;
      token[i] = (*this)[order[i]].token, parent[i] = place[(size_t)(*this)[order[i]].parent];
    }
    return (int)order.size();
  }

 private:
  const Beam& beam_;
  const int text_;
  std::vector<Node> nodes_;
  std::vector<int> frontier_{0};
  int drafted_ = 0;
};

struct Place {  // of a node that is read next
  int text, node;
};

// Grows the trees level by level. `read(level, places, chances, tokens)` reads nodes and gives the `k` likeliest children of each: -1, or
// what is wrong. Then writes per text at most `budget` tokens and the places of their parents, [texts, budget] each, and how many.
template <class Read>
int32_t grow(const Beam& b, std::vector<Growth>& trees, int k, const int64_t* token_of, const Read& read, int64_t* token, int64_t* parent, int64_t* sizes) {
  for (int level = 0; level < b.depth; ++level) {
    std::vector<Place> places;
    double best = 0;
    for (int i = 0; i < b.texts; ++i) {
      const Growth& tree = trees[(size_t)i];
      best = std::max(best, tree.best());
      if (tree.grows(level))
        for (const int node : tree.frontier()) places.push_back({i, node});
    }
    if (places.empty() || (level && best < b.stop)) break;
    std::vector<float> chances(places.size() * (size_t)k);
    std::vector<int64_t> found(chances.size());
    const int bad = read(level, places, chances.data(), found.data());
    if (bad >= 0) return bad;
    if (token_of)
      for (int64_t& each : found) each = token_of[each];
    for (size_t i = 0; i < places.size();) {
      Growth& tree = trees[(size_t)places[i].text];
      const size_t mine = tree.frontier().size();
      tree.add(chances.data() + i * (size_t)k, found.data() + i * (size_t)k, k);
      i += mine;
    }
  }
  for (int i = 0; i < b.texts; ++i) sizes[i] = trees[(size_t)i].write(token + (size_t)i * b.budget, parent + (size_t)i * b.budget);
  return -1;
}

// Outputs of some nodes at one level below the roots, given those of all that were read before.
int32_t read_level(const Model& m, const Layer* layers, int count, const Entry& e, std::vector<Growth>& trees, const std::vector<Place>& places, int level,
                   float* outputs, int64_t known, const Cache& cache, int threads) {
  const size_t n = places.size();
  std::vector<int32_t> row(n), slot(n), position(n), prefix(n), extra(n * (size_t)level);
  std::vector<int64_t> token(n), parent(n);
  for (size_t i = 0; i < n; ++i) {
    Growth& tree = trees[(size_t)places[i].text];
    tree.read(places[i].node, known + (int64_t)i);
    const Growth::Node& node = tree[places[i].node];
    row[i] = tree.row(), slot[i] = node.slot, prefix[i] = tree.length(), position[i] = tree.length() - 1 + level;
    tree.path(places[i].node, extra.data() + i * (size_t)level);
    token[i] = node.token, parent[i] = tree[node.parent].number;
  }
  const Tokens tokens = {(int32_t)n, level, row.data(), slot.data(), position.data(), prefix.data(), extra.data()};
  return eagle(m, layers, count, e, token.data(), outputs, parent.data(), outputs + (size_t)known * m.hidden, tokens, cache, threads);
}

}  // namespace

extern "C" {

// Numbers in a packed panel's unit that Python needs to pack weights: inputs per int8 block and per int8 scale.
int32_t foretell_int8_block() { return Int8::kBlock; }
int32_t foretell_int8_group() { return Int8::kGroup; }

// x [tokens, hidden], the residual stream, in place through layers first .. last - 1. What the first layer's attention reads is
// entry [tokens, in of its qkv], or, where that is null, the normed stream. tapped [count, tokens, hidden]: the stream before the layers
// that `taps` names, ascending. Returns -1, or the first token that points outside the cache or the rotary tables; then nothing was done.
int32_t foretell_stack(const Model* m, const Layer* layers, int32_t first, int32_t last, float* x, const float* entry,
                       const Tokens* tokens, const Cache* cache, const int32_t* taps, int32_t count, float* tapped, int32_t threads) {
  return stack(*m, layers, first, last, x, entry, *tokens, *cache, {taps, count, tapped}, threads);
}

// y [tokens, width] = x [tokens, in] W^T + bias.
void foretell_linear(int32_t precision, const Weight* w, const float* x, float* y, int32_t tokens, int32_t width, int32_t threads) {
  linear(precision, *w, x, y, tokens, width, threads);
}

// A stage over `tokens` states and the embeddings of the tokens that follow them.
void foretell_stage(int32_t precision, const Stage* s, const float* state, const float* embedded, float* next, float* logits, int32_t tokens,
                    int32_t threads) {
  in_precision(precision, [&](auto p) { run_stage<typename decltype(p)::Product>(*s, state, embedded, next, logits, tokens, threads); });
}

// The k likeliest entries of each row of scores x [tokens, width], descending, and their probabilities under its softmax, [tokens, k].
void foretell_likeliest(const float* x, float* chances, int64_t* indices, int32_t tokens, int32_t width, int32_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    likeliest_row(x + (size_t)t * width, width, k, chances + (size_t)t * k, indices + (size_t)t * k);
}

// Trees as of foretell_beam from the stages of an MLP speculator. start [texts, in of the first]; token `root[i]` follows text i.
int32_t foretell_stages_beam(int32_t precision, const Stage* stages, const Embedding* e, const int64_t* token_of, const float* start, const int64_t* root,
                             const Beam* b, int64_t* token, int64_t* parent, int64_t* sizes, int32_t threads) {
  std::vector<Growth> trees;
  for (int i = 0; i < b->texts; ++i) trees.emplace_back(*b, i, root[i]);
  const int inner = stages[0].project.out, d = stages[0].token.in, width = stages[0].head.out, k = std::min(b->width, width);
  const Buffer<float> states = buffer<float>((size_t)b->texts * (1 + (size_t)b->width * b->depth) * inner);
  int64_t known = 0;
  const auto read = [&](int level, const std::vector<Place>& places, float* chances, int64_t* found) {
    const size_t n = places.size();
    const Buffer<float> before = buffer<float>(n * (size_t)inner), embedded = buffer<float>(n * (size_t)d), scores = buffer<float>(n * (size_t)width);
    for (size_t i = 0; i < n; ++i) {
      Growth& tree = trees[(size_t)places[i].text];
      tree.read(places[i].node, known + (int64_t)i);
      const Growth::Node& node = tree[places[i].node];
      embed(*e, node.token, d, embedded.get() + i * (size_t)d);
      if (level) std::memcpy(before.get() + i * (size_t)inner, states.get() + (size_t)tree[node.parent].number * inner, 4 * (size_t)inner);
    }
    foretell_stage(precision, stages + level, level ? before.get() : start, embedded.get(), states.get() + (size_t)known * inner, scores.get(), (int)n,
                   threads);
    foretell_likeliest(scores.get(), chances, found, (int)n, width, k, threads);
    known += (int64_t)n;
    return -1;
  };
  return grow(*b, trees, k, token_of, read, token, parent, sizes);
}

void foretell_rms_norm(const float* x, const float* weight, float eps, float* y, int32_t tokens, int32_t width, int32_t threads) {
  norm_rows(x, weight, eps, y, tokens, width, 1, threads);
}

// EAGLE-3's layers on tokens and the `known` features before them: as foretell_stack, with x [tokens, hidden] only written. -2: a
// token or a parent is not there.
int32_t foretell_eagle(const Model* m, const Layer* layers, int32_t count, const Entry* e, const int64_t* token, const float* features,
                       int32_t known, const int64_t* parent, float* x, const Tokens* tokens, const Cache* cache, int32_t threads) {
  for (int t = 0; t < tokens->count; ++t) {
    const int64_t above = parent ? parent[t] : t;
    if (token[t] < 0 || token[t] >= e->embedding.vocab || above < 0 || above >= known) return -2;
  }
  return eagle(*m, layers, count, *e, token, features, parent, x, *tokens, *cache, threads);
}

// The same on tokens that follow states [tokens, kinds, hidden] of the target.
int32_t foretell_eagle_read(const Model* m, const Layer* layers, int32_t count, const Entry* e, const int64_t* token, const float* states, float* x,
                            const Tokens* tokens, const Cache* cache, int32_t threads) {
  const Buffer<float> features = fused(*m, *e, states, tokens->count, threads);
  return foretell_eagle(m, layers, count, e, token, features.get(), tokens->count, nullptr, x, tokens, cache, threads);
}

// Trees by confidence below roots whose outputs [texts, hidden] are given, of texts with room for a token: per text at most `budget`
// tokens and the places of their parents, [texts, budget] each, and how many there are. token_of: the token of every output of the head;
// null: its number.
int32_t foretell_beam(const Model* m, const Layer* layers, int32_t count, const Entry* e, const Weight* head, const float* norm, const int64_t* token_of,
                      const float* roots, const Beam* b, const Cache* cache, int64_t* token, int64_t* parent, int64_t* sizes, int32_t threads) {
  std::vector<Growth> trees;
  for (int i = 0; i < b->texts; ++i) trees.emplace_back(*b, i, 0);
  const int k = std::min(b->width, head->out);
  const Buffer<float> outputs = buffer<float>((size_t)b->texts * (1 + (size_t)b->width * b->depth) * m->hidden);
  std::memcpy(outputs.get(), roots, 4 * (size_t)b->texts * m->hidden);
  int64_t known = 0;
  const auto read = [&](int level, const std::vector<Place>& places, float* chances, int64_t* found) {
    const int bad = level ? read_level(*m, layers, count, *e, trees, places, level, outputs.get(), known, *cache, threads) : -1;
    if (bad >= 0) return bad;
    guess(m->precision, *head, outputs.get() + (size_t)known * m->hidden, norm, m->eps, chances, found, (int)places.size(), k, threads);
    known += (int64_t)places.size();
    return -1;
  };
  return grow(*b, trees, k, token_of, read, token, parent, sizes);
}

// The k likeliest outputs of a linear layer for each row of x [tokens, in].
void foretell_guess(int32_t precision, const Weight* w, const float* x, float* chances, int64_t* indices, int32_t tokens, int32_t k, int32_t threads) {
  guess(precision, *w, x, nullptr, 0, chances, indices, tokens, k, threads);
}

// Lowest index of the largest number of each row of x [tokens, width].
void foretell_argmax(const float* x, int64_t* out, int32_t tokens, int32_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) argmax_row(x + (size_t)t * width, width, out + t);
}

// The k largest numbers of each row of x and where they are, [tokens, k], descending.
void foretell_topk(const float* x, float* values, int64_t* indices, int32_t tokens, int32_t width, int32_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens > 1)
  for (int t = 0; t < tokens; ++t)
    top_row(x + (size_t)t * width, width, k, values + (size_t)t * k, indices + (size_t)t * k);
}

// The Hadamard rotation of int8 weights, in place: x [count], a multiple of the block.
void foretell_rotate(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += Int8::kBlock) Int8::rotate(x + i);
}
}
