// Sampling from rows of logits: temperature, top-k, top-p, min-p and a Gumbel-max race.
//
// distributions/sampler.py computes the same numbers with torch and numpy. A token weighs
// 2^bits exp((logit - largest) / temperature), rounded to an integer, so that sums do not depend on their order and
// every comparison is exact. The kept tokens are the first ones by falling weight, the lower id first among equals.
// Multiplications and additions are separate: the library is compiled without contraction.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "interface.h"
#include "threads.h"
#include "vectors.h"

namespace {

// float64 numbers or 64-bit integers per register: comparisons of wider vectors are compiled lane by lane.
constexpr int kWide = FORETELL_AVX512 ? 8 : FORETELL_AVX2 ? 4 : 2;
typedef double Wide __attribute__((vector_size(8 * kWide)));
typedef int64_t Long __attribute__((vector_size(8 * kWide)));
typedef uint64_t Counter __attribute__((vector_size(8 * kWide)));
typedef uint32_t HalfBits __attribute__((vector_size(4 * kWide)));
typedef float Half __attribute__((vector_size(4 * kWide)));

constexpr int kSampleBlock = 4096;        // logits that a thread takes at a time
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds a number below 2^51 to an integer
constexpr double kLeastExponent = -40.0;  // e^x weighs nothing below
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
// Taylor series of e^r for |r| <= ln(2) / 2, from r^10 down: to 3e-13.
constexpr double kExponential[] = {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                   1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
constexpr double kLn2 = 0.6931471805599453, kRootHalf = 0.7071067811865476;
constexpr int kLogTerms = 12;  // of the series of the inverse hyperbolic tangent
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int kFirstCut = 5, kCutStep = 4;  // binary orders below the largest weight within which tokens are gathered

inline Wide wide(double x) { return x - Wide{}; }

// The counters of kWide tokens.
inline Counter tokens_from(int64_t first) {
  Counter out;
  for (int i = 0; i < kWide; ++i) out[i] = (uint64_t)(first + i);
  return out;
}

// Integer weights of (logit - largest) / temperature.
struct Weigher {
  double largest, inverse_temperature;
  int bits;

  Wide exponent(Wide x) const {
    const Wide difference = x - wide(largest);
    // Also where both are infinite.
    return x == wide(largest) ? Wide{} : difference * wide(inverse_temperature);
  }

  // NaN weighs nothing.
  Long operator()(Wide logits) const {
    const Wide x = exponent(logits);
    const Long counts = x >= wide(kLeastExponent);
    const Wide clipped = counts ? x : wide(kLeastExponent);
    const Wide rounded = clipped * wide(kLog2E) + wide(kRound);
    const Wide n = rounded - wide(kRound);
    const Wide r = (clipped - n * wide(kLn2High)) - n * wide(kLn2Low);
    Wide p = wide(kExponential[0]);
    for (size_t i = 1; i < sizeof kExponential / sizeof *kExponential; ++i) p = p * r + wide(kExponential[i]);
    const Long shift = ((Long)rounded - (Long)wide(kRound) + (int64_t)bits) << 52;
    const Wide scaled = (Wide)((Long)p + shift);
    return ((Long)(scaled + wide(kRound)) - (Long)wide(kRound)) & counts;
  }

  int64_t operator()(double logit) const { return (*this)(wide(logit))[0]; }
};

inline Wide widen(const float* x) {
  Half narrow;
  std::memcpy(&narrow, x, sizeof narrow);
  return __builtin_convertvector(narrow, Wide);
}

// The first n logits; the others are -infinity.
inline Wide widen_part(const float* x, int n) {
  if (n >= kWide) return widen(x);
  float part[kWide];
  for (int i = 0; i < kWide; ++i) part[i] = i < n ? x[i] : -INFINITY;
  return widen(part);
}

inline int64_t total(Long v) {
  int64_t out = 0;
  for (int i = 0; i < kWide; ++i) out += v[i];
  return out;
}

// The largest logit, NaN left out.
float largest_logit(const float* x, int n) {
  Float best = splat(-INFINITY);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) best = larger(load<Float>(x + i), best);
  float most = largest(best);
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

int64_t sum_weights(const Weigher& weigh, const float* x, int n) {
  Long sum = {}, other = {};
  int i = 0;
  for (; i + 2 * kWide <= n; i += 2 * kWide) {
    sum += weigh(widen(x + i));
    other += weigh(widen(x + i + kWide));
  }
  for (; i < n; i += kWide) sum += weigh(widen_part(x + i, n - i));
  return total(sum + other);
}

// SplitMix64's finalizer (Steele et al., OOPSLA 2014).
template <class T>
inline T mix(T x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of the noise of all tokens at a position, from the key of a request's seed; CounterRNG.key in Python.
inline uint64_t noise_key(uint64_t key, int64_t position) {
  return mix((key ^ mix(((uint64_t)position << 32) + kGolden)) + kGolden);
}

// The noise of a token is 53 bits of a hash of the position's key and the token.
inline uint64_t noise_bits(uint64_t key, int64_t token) { return mix(key + kGolden * ((uint64_t)token + 1)) >> 11; }

// -log(u) of the number u in (0, 1] that the noise stands for.
inline double exponential_variate(uint64_t bits) {
  const double u = ((double)bits + 0.5) * 0x1p-53;
  int exponent;
  double m = std::frexp(u, &exponent);
  if (m < kRootHalf) m = m * 2, exponent -= 1;
  const double s = (m - 1) / (m + 1), z = s * s;
  double series = 0;
  for (int i = kLogTerms - 1; i >= 0; --i) series = series * z + 1.0 / (2 * i + 1);
  return -((double)exponent * kLn2 + 2 * s * series);
}

// `scale` times the Gumbel noise of the position with this key, -log of the exponential variates, of the tokens
// token_of[first] to token_of[first + n - 1], or first to first + n - 1 where it is null. In single precision, for
// drafts: what the target samples is exact.
void gumbel_noise(uint64_t key, float scale, const int64_t* token_of, int first, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    float u[kLanes], rest[kLanes];
    for (int half = 0; half < kLanes; half += kWide) {
      const int at = first + i + half, lanes = std::clamp(n - i - half, 0, kWide);
      Counter token = tokens_from(at);
      if (token_of) std::memcpy(&token, token_of + at, 8 * (size_t)lanes);
      const Counter bits = mix(key + kGolden * (token + 1)) >> 11;
      const Wide x = (__builtin_convertvector((Long)bits, Wide) + wide(0.5)) * wide(0x1p-53);
      const Half low = __builtin_convertvector(x, Half), high = __builtin_convertvector(wide(1.0) - x, Half);
      std::memcpy(u + half, &low, sizeof low);
      std::memcpy(rest + half, &high, sizeof high);
    }
    const Float variate = -logarithm(load<Float>(u), load<Float>(rest));
    store_part(out + i, splat(-scale) * logarithm(variate), std::min(kLanes, n - i));
  }
}

constexpr double kRaceSlack = 1 + 1e-9;  // for the rounding of the two sides of a comparison

// The Gumbel-max trick as a race: the token with the least noise over weight wins, of equals the lower id.
struct Winner {
  double time = INFINITY;
  int64_t token = -1;
  void offer(double other, int64_t other_token) {
    if (other < time || (other == time && other_token < token)) time = other, token = other_token;
  }
  // -log(u) >= 1 - u, so most tokens lose without a logarithm.
  void run(uint64_t bits, int64_t other_token, int64_t weight) {
    const double rest = 1.0 - (double)bits * 0x1p-53;
    if (rest <= time * kRaceSlack * (double)weight + 0x1p-52)
      offer(exponential_variate(bits) / (double)weight, other_token);
  }
};

// The race between all tokens from `first` on; `winner` is one of them already. Of most tokens a bound tells that they
// lose: 2^y <= (1 + f) 2^n for y = n + f, which are the bits of a float, and the first 24 bits of the noise.
void race_block(const Weigher& weigh, const float* x, int first, int n, uint64_t key, Winner& winner) {
  constexpr float kOne = 1.0f / (1 << 24);
  constexpr double kSlack = 1.001;  // for the rounding of the bound
  const float most = std::ldexp(1.0, weigh.bits) * kSlack, slope = (float)std::min(weigh.inverse_temperature, 1e30);
  const Float largest = splat((float)weigh.largest);
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = std::min(kLanes, n - i);
    uint32_t high[kLanes];
    for (int part = 0; part < kLanes; part += kWide) {
      const HalfBits top =
          __builtin_convertvector(mix(key + kGolden * tokens_from(first + i + part + 1)) >> 40, HalfBits);
      std::memcpy(high + part, &top, sizeof top);
    }
    const Float below = load_part<Float>(x + i, lanes) - largest;
    const Float y = larger(below * splat(slope) * splat((float)kLog2E), splat(-126.0f));
    const Float weight = (Float)(to_integer(y * splat((float)(1 << 23))) + splat(127 << 23));
    const Float rest = to_float(splat((1 << 24) - 1) - load<Int>(high)) * splat(kOne);
    const Float bound = fma(weight, splat((float)winner.time * most), splat(1e-6f));
    // A logit that is as large, or NaN, is not below.
    const Int runs = ~((below < Float{}) & (rest > bound));
    if (!any(runs)) continue;
    int32_t run[kLanes];
    store(run, runs);
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t exact = run[lane] ? weigh((double)x[i + lane]) : 0;
      if (exact > 0) winner.run(noise_bits(key, first + i + lane), first + i + lane, exact);
    }
  }
}

struct Candidate {
  int64_t weight;
  int32_t token;
};

// Tokens that weigh at least `cut`, 1 or more, by rising id.
void gather(const Weigher& weigh, const float* x, int n, int64_t cut, std::vector<Candidate>& out) {
  // The least logit with some room for rounding; the weights decide.
  const double span = (std::log((double)cut) - weigh.bits * kLn2) / weigh.inverse_temperature;
  double least = weigh.largest + span;
  least -= 1e-6 * (std::abs(weigh.largest) + std::abs(span));
  const Float bound = splat(std::isnan(least) ? -INFINITY : std::nextafter((float)least, -INFINITY));
  out.clear();
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = std::min(kLanes, n - i);
    const Float v = load_part<Float>(x + i, lanes);
    const Int above = v >= bound;
    if (!any(above)) continue;
    for (int half = 0; half < lanes; half += kWide) {
      const Long weight = weigh(widen_part(x + i + half, lanes - half));
      for (int lane = 0; lane < kWide; ++lane)
        if (weight[lane] >= cut && half + lane < lanes) out.push_back({weight[lane], i + half + lane});
    }
  }
}

// The first tokens by falling weight whose predecessors weigh less than `limit` together: those above `weight`, and of
// those that weigh as much the `equals` lowest ids.
struct Nucleus {
  int64_t weight = 0;
  int64_t equals = std::numeric_limits<int64_t>::max();
};

Nucleus find_nucleus(std::vector<int64_t>& weights, int64_t limit) {
  size_t first = 0, end = weights.size();
  int64_t before = 0;  // weight of the tokens that are known to come first
  while (first < end) {
    const int64_t a = weights[first], b = weights[first + (end - first) / 2], c = weights[end - 1];
    const int64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto begin = weights.begin();
    const auto above =
        std::partition(begin + (int64_t)first, begin + (int64_t)end, [&](int64_t w) { return w > pivot; });
    int64_t heavier = 0;
    for (auto it = begin + (int64_t)first; it != above; ++it) heavier += *it;
    if (before + heavier >= limit) {
      end = (size_t)(above - begin);
      continue;
    }
    const auto below = std::partition(above, begin + (int64_t)end, [&](int64_t w) { return w == pivot; });
    before += heavier;
    const int64_t needed = (limit - before + pivot - 1) / pivot, equals = below - above;
    if (needed <= equals) return {pivot, needed};
    before += equals * pivot;
    first = (size_t)(below - begin);
  }
  return {};
}

// The tokens that top-k, top-p and min-p keep, by rising id. `all`: the weight of all tokens, needed for top-p without
// top-k.
void keep_tokens(const Weigher& weigh, const float* x, int n, const Sampling& s, int64_t all,
                 std::vector<Candidate>& kept) {
  const int64_t most = (int64_t)1 << weigh.bits;
  const bool counts = s.top_k > 0 && s.top_k < n, has_nucleus = s.top_p < 1;
  const auto limit_of = [&](int64_t weight) { return (int64_t)std::ceil(s.top_p * (double)weight); };
  const int64_t least = std::max<int64_t>(1, (int64_t)std::ceil(s.min_p * (double)most));
  const int64_t lowest_cut = counts && has_nucleus ? 1 : least;
  for (int below = kFirstCut;; below += kCutStep) {
    const bool is_last = !(counts || has_nucleus) || below >= weigh.bits;
    const int64_t cut = is_last ? lowest_cut : std::max(lowest_cut, most >> below);
    gather(weigh, x, n, cut, kept);
    if (cut == lowest_cut) break;
    if (counts) {
      if ((int64_t)kept.size() >= s.top_k) break;
    } else if (has_nucleus) {
      int64_t sum = 0;
      for (const Candidate& each : kept) sum += each.weight;
      if (sum >= limit_of(all)) break;
    }
  }
  std::vector<int64_t> weights;
  const auto collect = [&] {
    weights.clear();
    for (const Candidate& each : kept) weights.push_back(each.weight);
  };
  const auto drop = [&](auto condition) {
    kept.erase(std::remove_if(kept.begin(), kept.end(), condition), kept.end());
  };
  if (counts && (int64_t)kept.size() > s.top_k) {
    collect();
    std::nth_element(weights.begin(), weights.begin() + s.top_k - 1, weights.end(), std::greater<int64_t>());
    const int64_t last = weights[(size_t)s.top_k - 1];
    drop([&](const Candidate& each) { return each.weight < last; });
  }
  if (has_nucleus) {
    if (counts) {
      all = 0;
      for (const Candidate& each : kept) all += each.weight;
    }
    collect();
    Nucleus nucleus = find_nucleus(weights, limit_of(all));
    drop([&](const Candidate& each) {
      return each.weight < nucleus.weight || (each.weight == nucleus.weight && nucleus.equals-- <= 0);
    });
  }
  drop([&](const Candidate& each) { return each.weight < least; });
}

bool truncates(const Sampling& s, int n) { return s.top_p < 1 || s.min_p > 0 || (s.top_k > 0 && s.top_k < n); }
bool needs_total(const Sampling& s, int n) { return s.top_p < 1 && !(s.top_k > 0 && s.top_k < n); }

int weight_bits(int n) {
  int length = 0;
  while (n >> length) ++length;
  return std::min(50, 62 - length);
}

// Weighers of the rows x + place[i] * n, and the weight of all tokens where it is needed.
void prepare_rows(const float* x, const int64_t* place, const Sampling* s, int rows, int n, int threads,
                  std::vector<Weigher>& weighers, std::vector<int64_t>& sums) {
  const int blocks = (n + kSampleBlock - 1) / kSampleBlock;
  std::vector<float> largest((size_t)rows * blocks);
  std::vector<int64_t> parts((size_t)rows * blocks);
  const auto block = [&](int item) {
    const int first = item % blocks * kSampleBlock;
    return std::pair(x + (size_t)place[item / blocks] * n + first, std::min(kSampleBlock, n - first));
  };
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int item = 0; item < rows * blocks; ++item) {
    const auto [part, count] = block(item);
    largest[(size_t)item] = largest_logit(part, count);
  }
  for (int i = 0; i < rows; ++i)
    weighers.push_back({*std::max_element(largest.begin() + i * blocks, largest.begin() + (i + 1) * blocks),
                        s[i].inverse_temperature, weight_bits(n)});
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int item = 0; item < rows * blocks; ++item) {
    const auto [part, count] = block(item);
    if (needs_total(s[item / blocks], n))
      parts[(size_t)item] = sum_weights(weighers[(size_t)(item / blocks)], part, count);
  }
  for (int i = 0; i < rows; ++i) {
    int64_t sum = 0;
    for (int b = 0; b < blocks; ++b) sum += parts[(size_t)(i * blocks + b)];
    sums.push_back(sum);
  }
}

// The winner of the race between the tokens that truncation keeps.
Winner race_kept(const Weigher& weigh, const float* row, int n, const Sampling& s, int64_t all) {
  std::vector<Candidate> kept;
  keep_tokens(weigh, row, n, s, all, kept);
  const auto lighter = [](const Candidate& a, const Candidate& b) { return a.weight < b.weight; };
  const Candidate& heaviest = *std::max_element(kept.begin(), kept.end(), lighter);
  Winner winner;
  winner.run(noise_bits(s.noise, heaviest.token), heaviest.token, heaviest.weight);
  for (const Candidate& each : kept) winner.run(noise_bits(s.noise, each.token), each.token, each.weight);
  return winner;
}

// A token from each of the rows x + place[i] * n; -1 where no logit is above -infinity.
void sample_rows(const float* x, const int64_t* place, const Sampling* s, int rows, int n, int64_t* out, int threads) {
  std::vector<Weigher> weighers;
  std::vector<int64_t> sums;
  prepare_rows(x, place, s, rows, n, threads, weighers, sums);
  const auto logits = [&](int i) { return x + (size_t)place[i] * n; };
  const int blocks = (n + kSampleBlock - 1) / kSampleBlock;
  std::vector<Winner> winners((size_t)rows * blocks);
  for (int i = 0; i < rows; ++i) {
    const Weigher& weigh = weighers[(size_t)i];
    if (weigh.largest == -INFINITY || truncates(s[i], n)) continue;
    const float* row = logits(i);
    const int64_t best = std::find(row, row + n, (float)weigh.largest) - row;
    Winner first;
    first.run(noise_bits(s[i].noise, best), best, weigh((double)row[best]));
    std::fill_n(winners.begin() + (ptrdiff_t)i * blocks, blocks, first);
  }
  // One region for blocks and rows: a region inside another one starts new threads each time.
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int item = 0; item < rows * blocks; ++item) {
    const int i = item / blocks, first = item % blocks * kSampleBlock;
    const Weigher& weigh = weighers[(size_t)i];
    if (weigh.largest == -INFINITY) continue;
    Winner& winner = winners[(size_t)item];
    if (!truncates(s[i], n))
      race_block(weigh, logits(i) + first, first, std::min(kSampleBlock, n - first), s[i].noise, winner);
    else if (!first)
      winner = race_kept(weigh, logits(i), n, s[i], sums[(size_t)i]);
  }
  for (int i = 0; i < rows; ++i) {
    Winner winner;
    for (int b = 0; b < blocks; ++b) {
      const Winner& each = winners[(size_t)(i * blocks + b)];
      winner.offer(each.time, each.token);
    }
    out[i] = winner.token;
  }
}

// Takes the tokens out of a row that truncation does not keep: their logits become -infinity.
void truncate_row(float* x, const Sampling& s, int n) {
  if (!truncates(s, n)) return;
  const Weigher weigh = {largest_logit(x, n), s.inverse_temperature, weight_bits(n)};
  if (weigh.largest == -INFINITY) return;
  std::vector<Candidate> kept;
  keep_tokens(weigh, x, n, s, needs_total(s, n) ? sum_weights(weigh, x, n) : 0, kept);
  std::vector<float> logits;
  for (const Candidate& each : kept) logits.push_back(x[each.token]);
  std::fill(x, x + n, -INFINITY);
  for (size_t i = 0; i < kept.size(); ++i) x[kept[i].token] = logits[i];
}

// The kept tokens of a row by rising id, and their weights; returns how many there are.
int keep_row(const float* x, const Sampling& s, int n, int32_t* tokens, int64_t* weights, int threads) {
  std::vector<Weigher> weighers;
  std::vector<int64_t> sums;
  const int64_t place = 0;
  prepare_rows(x, &place, &s, 1, n, threads, weighers, sums);
  if (weighers[0].largest == -INFINITY) return 0;
  std::vector<Candidate> kept;
  if (truncates(s, n))
    keep_tokens(weighers[0], x, n, s, sums[0], kept);
  else
    gather(weighers[0], x, n, 1, kept);
  for (size_t i = 0; i < kept.size(); ++i) tokens[i] = kept[i].token, weights[i] = kept[i].weight;
  return (int)kept.size();
}

}  // namespace
