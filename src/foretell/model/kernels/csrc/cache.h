// How keys and values lie in the key-value cache.
//
// A *number* is a float32, a bfloat16, or an int8 that is multiplied with a scale per token and head. Numbers lie as
// inner products read them: keys in blocks of 16 slots, [word of the head][slot][number of the word]; values in groups
// of as many slots as a word has numbers, [dimension][slot]. So one vector holds the same word of 16 keys, or 16
// dimensions of a group of values. int8 numbers are widened to words when they are read; heads are rotated before they
// are rounded to them, and so must be the queries, and the results of attention.
//
// The slots of a row lie in blocks of kCacheBlock slots anywhere in the cache; a table names the blocks of every row
// (paged attention: Kwon et al., arXiv 2309.06180). Rows may share blocks.

#pragma once

#include <cmath>

#include "interface.h"
#include "precisions.h"
#include "threads.h"

namespace {

constexpr int kCacheBlock = 64;  // slots; `BLOCK_SLOTS` of kv_cache.py

// The part of the cache that belongs to one key-value head of a layer, as a row sees it.
struct CacheHead {
  uint8_t *keys, *values;
  float *key_scales, *value_scales;  // for int8
  const int32_t* table;

  // Where a slot of the row lies, in slots of the whole head; the slots of a block follow one another.
  size_t place(int slot) const { return (size_t)table[slot / kCacheBlock] * kCacheBlock + slot % kCacheBlock; }
};

// A cache whose numbers are multiplied as C's.
template <class C>
class CacheLayout {
 public:
  CacheLayout(const Cache& cache, int kv_heads, int head_dim)
      : cache_(cache),
        kv_heads_(kv_heads),
        dim_(head_dim),
        words_(head_dim / C::kDepth),
        is_int8_(cache.k_scale != nullptr),
        number_bytes_(is_int8_ ? 1 : 4 / C::kDepth) {}

  CacheHead head(int layer, int row, int kv) const {
    const size_t i = ((size_t)layer * kv_heads_ + kv) * cache_.blocks * kCacheBlock;
    return {(uint8_t*)cache_.k + i * dim_ * number_bytes_, (uint8_t*)cache_.v + i * dim_ * number_bytes_,
            is_int8_ ? cache_.k_scale + i : nullptr, is_int8_ ? cache_.v_scale + i : nullptr,
            cache_.table + (size_t)row * cache_.row_blocks};
  }

  // Where the keys and values of slots from a multiple of 16 on begin.
  const char* keys_at(const CacheHead& at, int slot) const {
    return (const char*)at.keys + at.place(slot) * dim_ * number_bytes_;
  }
  const char* values_at(const CacheHead& at, int slot) const {
    return (const char*)at.values + at.place(slot) * dim_ * number_bytes_;
  }
  // Whether the row has a block for a slot.
  bool has(const CacheHead& at, int slot) const {
    return slot / kCacheBlock < cache_.row_blocks && at.table[slot / kCacheBlock] >= 0;
  }

  // Where numbers are int8, multiplies a head by an orthonormal Hadamard matrix over blocks of 64 or 16 dimensions,
  // which is its own inverse and spreads outliers (QuaRot, arXiv 2404.00456).
  void rotate(float* x) const {
    if (!is_int8_) return;
    if (dim_ % Int8::kBlock == 0) {
      for (int i = 0; i < dim_; i += Int8::kBlock) Int8::rotate(x + i);
      return;
    }
    constexpr auto kAll = std::make_index_sequence<kLanes>();
    for (int i = 0; i < dim_; i += kLanes) {
      Float v = load<Float>(x + i);
      Int8::butterfly<8>(v, kAll), Int8::butterfly<4>(v, kAll);
      Int8::butterfly<2>(v, kAll), Int8::butterfly<1>(v, kAll);
      store(x + i, v * splat(0.25f));
    }
  }

  // Threads may store different slots at the same time.
  void store_key(const CacheHead& at, int slot, const float* x) const {
    const size_t place = at.place(slot), first = place / kLanes * words_ * kLanes + place % kLanes;  // in words
    if (is_int8_) {
      int8_t numbers[kMaxHeadDim];
      at.key_scales[place] = quantize(x, numbers);
      for (int i = 0; i < dim_; ++i)
        at.keys[(first + (size_t)(i / C::kDepth) * kLanes) * C::kDepth + i % C::kDepth] = (uint8_t)numbers[i];
      return;
    }
    uint32_t words[kMaxHeadDim];
    C::pack(x, dim_, words);
    for (int w = 0; w < words_; ++w) ((uint32_t*)at.keys)[first + (size_t)w * kLanes] = words[w];
  }

  void store_value(const CacheHead& at, int slot, const float* x) const {
    const size_t place = at.place(slot);
    const size_t first = place / C::kDepth * dim_ * C::kDepth + place % C::kDepth;  // in numbers
    if (is_int8_) {
      int8_t numbers[kMaxHeadDim];
      at.value_scales[place] = quantize(x, numbers);
      for (int i = 0; i < dim_; ++i) at.values[first + (size_t)i * C::kDepth] = (uint8_t)numbers[i];
      return;
    }
    uint32_t words[kMaxHeadDim];
    C::pack(x, dim_, words);
    if constexpr (C::kDepth == 1)
      std::memcpy((uint32_t*)at.values + first, words, 4 * (size_t)dim_);
    else
      for (int i = 0; i < dim_; ++i) ((uint16_t*)at.values)[first + (size_t)i * 2] = ((const uint16_t*)words)[i];
  }

  // Copies a slot of a head, `from` that of a cache of the same kind; source and target may be the same slot.
  void copy(const CacheHead& from, int source_slot, const CacheHead& at, int target_slot) const {
    const size_t source = from.place(source_slot), target = at.place(target_slot);
    const auto key = [&](size_t place) {
      return (place / kLanes * words_ * kLanes + place % kLanes) * C::kDepth * number_bytes_;
    };
    const int word_bytes = C::kDepth * number_bytes_, step = kLanes * word_bytes;
    for (int w = 0; w < words_; ++w)
      std::memcpy(at.keys + key(target) + w * step, from.keys + key(source) + w * step, (size_t)word_bytes);
    const auto value = [&](size_t place) {
      return (place / C::kDepth * dim_ * C::kDepth + place % C::kDepth) * number_bytes_;
    };
    for (int i = 0; i < dim_; ++i)
      std::memcpy(at.values + value(target) + i * word_bytes, from.values + value(source) + i * word_bytes,
                  (size_t)number_bytes_);
    if (!is_int8_) return;
    at.key_scales[target] = from.key_scales[source];
    at.value_scales[target] = from.value_scales[source];
  }

  // Words of scratch memory that reading so many keys or values at once needs.
  size_t scratch_words(int keys) const { return is_int8_ ? (size_t)keys * words_ : 0; }

  // The words of groups of 16 keys from a slot on, all in one block: [group][word][key]. Where they must be widened,
  // as many bytes from `ahead` on are prefetched meanwhile.
  const uint32_t* key_words(const CacheHead& at, int slot, int groups, uint32_t* scratch, const char* ahead) const {
    const char* keys = keys_at(at, slot);
    return is_int8_ ? widen((const int8_t*)keys, groups * words_, scratch, ahead) : (const uint32_t*)keys;
  }

  // The words of the values of `count` slots from a multiple of kDepth on, all in one block:
  // [slot / kDepth][dimension].
  const uint32_t* value_words(const CacheHead& at, int slot, int count, uint32_t* scratch, const char* ahead) const {
    const char* values = values_at(at, slot);
    if (!is_int8_) return (const uint32_t*)values;
    return widen((const int8_t*)values, count / C::kDepth * (dim_ / kLanes), scratch, ahead);
  }

  // 16 words of values: dimensions first .. first + 15 of kDepth slots; 0 for slot -1.
  Word value_word(const CacheHead& at, const int* slots, int first) const {
    Word out = {};
    for (int d = 0; d < C::kDepth; ++d) {
      if (slots[d] < 0) continue;
      const size_t place = at.place(slots[d]), where = place / C::kDepth * dim_ + first;
      const Word read = is_int8_ ? widened((const int8_t*)at.values + where * C::kDepth)
                                 : load<Word>((const uint32_t*)at.values + where);
      out |= C::place(C::take(read, (int)(place % C::kDepth)), d);
    }
    return out;
  }

  // Multiplies scores of groups of 16 keys from a slot on with the keys' scales.
  void scale_scores(const CacheHead& at, int slot, int groups, float* scores) const {
    if (!is_int8_) return;
    const float* scales = at.key_scales + at.place(slot);
    for (int i = 0; i < groups * kLanes; i += kLanes)
      store(scores + i, load<Float>(scores + i) * load<Float>(scales + i));
  }

  bool scales_values() const { return is_int8_; }
  const float* value_scales(const CacheHead& at, int slot) const { return at.value_scales + at.place(slot); }

 private:
  // int8 numbers and their scale.
  float quantize(const float* x, int8_t* numbers) const {
    Float most = {};
    for (int i = 0; i < dim_; i += kLanes) most = larger(most, larger(load<Float>(x + i), -load<Float>(x + i)));
    const float peak = largest(most), inverse = peak > 0 ? 127 / peak : 0;
    for (int i = 0; i < dim_; i += kLanes) store_bytes(numbers + i, round_product(load<Float>(x + i), inverse));
    return peak / 127;
  }

  static Word widened(const int8_t* numbers) { return C::from_int8(numbers); }

  // Words of int8 numbers; meanwhile as many bytes from `ahead` on are prefetched.
  static const uint32_t* widen(const int8_t* numbers, int vectors, uint32_t* out, const char* ahead) {
    for (int i = 0; i < vectors; ++i) {
      const size_t first = (size_t)i * kLanes * C::kDepth;
      __builtin_prefetch(ahead + first, 0, 2);
      store(out + (size_t)i * kLanes, widened(numbers + first));
    }
    return out;
  }

  const Cache& cache_;
  const int kv_heads_, dim_, words_;
  const bool is_int8_;
  const int number_bytes_;
};

// Copies slots of a row to target, target + 1, ... in all layers.
template <class C>
void move_slots(const CacheLayout<C>& cache, int layers, int kv_heads, int row, const int32_t* source, int count,
                int target) {
  for (int i = 0; i < layers * kv_heads; ++i) {
    const CacheHead head = cache.head(i / kv_heads, row, i % kv_heads);
    for (int j = 0; j < count; ++j) cache.copy(head, source[j], head, target + j);
  }
}

// Copies slots of a row of one cache, other ones for every layer and head, [layers, kv_heads, count], to target,
// target + 1, ... of a row of another.
template <class C>
void copy_slots(const CacheLayout<C>& from, int from_row, const int32_t* source, int count, const CacheLayout<C>& to,
                int to_row, int target, int layers, int kv_heads) {
  for (int i = 0; i < layers * kv_heads; ++i) {
    const CacheHead head = from.head(i / kv_heads, from_row, i % kv_heads),
                    other = to.head(i / kv_heads, to_row, i % kv_heads);
    for (int j = 0; j < count; ++j) to.copy(head, source[(size_t)i * count + j], other, target + j);
  }
}

}  // namespace
