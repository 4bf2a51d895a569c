// How keys and values lie in the key-value cache.
//
// A *number* is a float32, a bfloat16, or an int8 or int4 that is multiplied with a scale per token and head. Numbers
// lie as inner products read them: keys in blocks of 16 slots, [word of the head][slot][number of the word]; values in
// groups of as many slots as a word has numbers, [dimension][slot]. So one vector holds the same word of 16 keys, or 16
// dimensions of a group of values. int8 and int4 numbers are widened to words when they are read; heads are rotated
// before they are rounded to them, and so must be the queries, and the results of attention. int4 numbers take half a
// byte. int8 numbers may lie in two parts, their upper and their lower halves, so that one can be read alone
// (QuantSpec, arXiv 2502.10424).
//
// The slots of a row lie in blocks of kCacheBlock slots anywhere in the cache; a table names the blocks of every row
// (paged attention: Kwon et al., arXiv 2309.06180). Rows may share blocks.

#pragma once

#include <cmath>

#include "interface.h"
#include "packed_groups.h"
#include "precisions.h"
#include "threads.h"

namespace {

constexpr int kCacheBlock = 64;  // slots; `BLOCK_SLOTS` of kv_cache.py

// The part of the cache that belongs to one key-value head of a layer, as a row sees it.
struct CacheHead {
  uint8_t *keys, *values;
  uint8_t *low_keys, *low_values;    // of numbers in two parts
  float *key_scales, *value_scales;  // of int8 and int4 numbers
  const int32_t* table;
  PackedHead packed;
  uint8_t *least, *most;  // of pages of keys

  // A tile that leaves pages out numbers the slots that it reads: its first `selected` ones are those of pages of 16,
  // the others lie `hidden` slots later.
  const int32_t* pages = nullptr;
  int selected = 0, hidden = 0;

  int slot_of(int i) const {
    return i < selected ? pages[i / kLanes] * kLanes + i % kLanes : i + hidden;
  }
  // Where a slot of the row lies, in slots of the whole head; the slots of a block follow one another.
  size_t place(int i) const {
    const int slot = slot_of(i);
    return (size_t)table[slot / kCacheBlock] * kCacheBlock + slot % kCacheBlock;
  }
  // Slots that follow one another in memory, from a multiple of as many on.
  int run() const { return pages ? kLanes : kCacheBlock; }
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
        scaled_(cache.k_scale != nullptr),
        two_parts_(cache.k_low != nullptr),
        reads_halves_(scaled_ && (cache.bits == 4 || (two_parts_ && cache.coarse))),
        stored_dim_(scaled_ && (cache.bits == 4 || two_parts_) ? head_dim / 2 : head_dim),
        number_bytes_(scaled_ ? 1 : 4 / C::kDepth),
        packed_(cache, kv_heads, head_dim) {}

  CacheHead head(int layer, int row, int kv) const {
    const size_t i = ((size_t)layer * kv_heads_ + kv) * cache_.blocks * kCacheBlock;
    const auto part = [&](void* all, size_t size) { return all ? (uint8_t*)all + i * size : nullptr; };
    const size_t size = (size_t)stored_dim_ * number_bytes_, bound_bytes = 4 * (size_t)words_ / kLanes;
    return {part(cache_.k, size), part(cache_.v, size), part(cache_.k_low, size), part(cache_.v_low, size),
            (float*)part(cache_.k_scale, 4), (float*)part(cache_.v_scale, 4),
            cache_.table + (size_t)row * cache_.row_blocks, packed_.head(layer, row, kv),
            part(cache_.k_least, bound_bytes), part(cache_.k_most, bound_bytes)};
  }

  // Where the keys and values of slots from a multiple of 16 on begin.
  const char* keys_at(const CacheHead& at, int slot) const {
    return (const char*)at.keys + at.place(slot) * stored_dim_ * number_bytes_;
  }
  const char* values_at(const CacheHead& at, int slot) const {
    return (const char*)at.values + at.place(slot) * stored_dim_ * number_bytes_;
  }
  // Whether the row has a block for a slot.
  bool has(const CacheHead& at, int slot) const {
    const int block = at.slot_of(slot) / kCacheBlock;
    return block < cache_.row_blocks && at.table[block] >= 0;
  }

  // Where numbers have scales, multiplies a head by an orthonormal Hadamard matrix over blocks of 64 or 16 dimensions,
  // which is its own inverse and spreads outliers (QuaRot, arXiv 2404.00456).
  void rotate(float* x) const {
    if (!scaled_) return;
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
    const size_t place = at.place(slot);
    if (scaled_) {
      uint8_t numbers[kMaxHeadDim];
      at.key_scales[place] = quantize(x, numbers);
      const size_t first = (place / kLanes * (stored_dim_ / C::kDepth) * kLanes + place % kLanes) * C::kDepth;
      store_numbers(at.keys, at.low_keys, numbers,
                    [&](int i) { return first + (size_t)(i / C::kDepth) * kLanes * C::kDepth + i % C::kDepth; });
      return;
    }
    const size_t first = place / kLanes * words_ * kLanes + place % kLanes;  // in words
    uint32_t words[kMaxHeadDim];
    C::pack(x, dim_, words);
    for (int w = 0; w < words_; ++w) ((uint32_t*)at.keys)[first + (size_t)w * kLanes] = words[w];
  }

  void store_value(const CacheHead& at, int slot, const float* x) const {
    const size_t place = at.place(slot);
    const size_t first = place / C::kDepth * stored_dim_ * C::kDepth + place % C::kDepth;  // in numbers
    if (scaled_) {
      uint8_t numbers[kMaxHeadDim];
      at.value_scales[place] = quantize(x, numbers);
      store_numbers(at.values, at.low_values, numbers, [&](int i) { return first + (size_t)i * C::kDepth; });
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
    copy_part(from.keys, from.values, source, at.keys, at.values, target);
    if (two_parts_) copy_part(from.low_keys, from.low_values, source, at.low_keys, at.low_values, target);
    if (!scaled_) return;
    at.key_scales[target] = from.key_scales[source];
    at.value_scales[target] = from.value_scales[source];
  }

  // Packs the keys and values of the group from a slot on, which are stored whole.
  void pack(const CacheHead& at, int slot) const {
    const size_t place = at.place(slot);
    const auto* keys = (const uint32_t*)at.keys;
    const auto* values = (const uint32_t*)at.values;
    packed_.pack_keys(at.packed, slot, [&](int h, int d) {
      const size_t word = (place / kLanes + h) * words_ + d / C::kDepth;
      return C::number(load<Word>(keys + word * kLanes), d % C::kDepth);
    });
    packed_.pack_values(at.packed, slot, [&](int s, int i) {
      const size_t word = (place + s) / C::kDepth * dim_ + (size_t)i * kLanes;
      return C::number(load<Word>(values + word), (int)(place + s) % C::kDepth);
    });
  }
  const PackedGroups<C>& packed() const { return packed_; }

  // Whether keys and values must be widened to words.
  bool widens() const { return scaled_ || packed_.any(); }
  // Words of scratch memory that reading so many keys or values at once needs.
  size_t scratch_words(int keys) const { return widens() ? (size_t)keys * words_ : 0; }

  // The words of groups of 16 keys from a slot on, all in one block: [group][word][key]. Where they must be widened,
  // as many bytes from `ahead` on are prefetched meanwhile. packed: the first slots that are read packed; the groups
  // lie on one side of it.
  const uint32_t* key_words(const CacheHead& at, int slot, int groups, int packed, uint32_t* scratch,
                            const char* ahead) const {
    if (slot < packed) {
      packed_.key_words(at.packed, slot, groups, scratch);
      return scratch;
    }
    if (!scaled_) return (const uint32_t*)keys_at(at, slot);
    return widen(at.keys, at.low_keys, at.place(slot) * stored_dim_, groups, words_, scratch, ahead);
  }

  // The words of the values of `count` slots from a multiple of kDepth on, all in one block:
  // [slot / kDepth][dimension]. packed: see `key_words`, but values may lie on both sides.
  const uint32_t* value_words(const CacheHead& at, int slot, int count, int packed, uint32_t* scratch,
                              const char* ahead) const {
    if (slot < packed) {
      const int narrow = std::min(count, packed - slot);
      packed_.value_words(at.packed, slot, narrow, scratch);
      if (narrow < count)
        std::memcpy(scratch + (size_t)narrow * words_, values_at(at, slot + narrow),
                    4 * (size_t)((count - narrow + C::kDepth - 1) / C::kDepth) * dim_);
      return scratch;
    }
    if (!scaled_) return (const uint32_t*)values_at(at, slot);
    return widen(at.values, at.low_values, at.place(slot) * stored_dim_, count / C::kDepth, dim_ / kLanes, scratch,
                 ahead);
  }

  // 16 words of values: dimensions first .. first + 15 of kDepth slots; 0 for slot -1.
  Word value_word(const CacheHead& at, const int* slots, int first) const {
    Word out = {};
    for (int d = 0; d < C::kDepth; ++d) {
      if (slots[d] < 0) continue;
      const size_t place = at.place(slots[d]);
      const Word read = scaled_ ? value_vector(at, place / C::kDepth, first)
                                : load<Word>((const uint32_t*)at.values + place / C::kDepth * dim_ + first);
      out |= C::place(C::take(read, (int)(place % C::kDepth)), d);
    }
    return out;
  }

  // Multiplies scores of groups of 16 keys from a slot on with the keys' scales.
  void scale_scores(const CacheHead& at, int slot, int groups, float* scores) const {
    if (!scaled_) return;
    const float* scales = at.key_scales + at.place(slot);
    const Float factor = splat(scale_factor());
    for (int i = 0; i < groups * kLanes; i += kLanes)
      store(scores + i, load<Float>(scores + i) * (load<Float>(scales + i) * factor));
  }

  bool scales_values() const { return scaled_; }
  const float* value_scales(const CacheHead& at, int slot) const { return at.value_scales + at.place(slot); }
  // What scales are multiplied with: the upper half of an int8 number q is n with q about 8 (2 n - 15).
  float scale_factor() const { return reads_halves_ && two_parts_ ? 8.0f : 1.0f; }

 private:
  static constexpr int kVector = kLanes * C::kDepth;  // numbers

  // Numbers and their scale: of 8 bits x / scale + 128; of 4 bits n with x about (2 n - 15) * scale, so that as many
  // levels are above zero as below.
  float quantize(const float* x, uint8_t* numbers) const {
    Float most = {};
    for (int i = 0; i < dim_; i += kLanes) most = larger(most, larger(load<Float>(x + i), -load<Float>(x + i)));
    const float peak = largest(most);
    if (cache_.bits == 4) {
      const float inverse = peak > 0 ? 7.5f / peak : 0, half = peak / 15;
      for (int i = 0; i < dim_; i += kLanes) {
        const Int level = round_product(load<Float>(x + i) - splat(half), inverse) + splat(8);
        store_bytes(numbers + i, level);
      }
      return half;
    }
    const float inverse = peak > 0 ? 127 / peak : 0;
    for (int i = 0; i < dim_; i += kLanes)
      store_bytes(numbers + i, round_product(load<Float>(x + i), inverse) + splat(128));
    return peak / 127;
  }

  // Stores a head's numbers, number i of a half or a whole head at byte(i). int8 numbers in one part are signed. Of
  // others a byte holds 4 bits of number i and of number i + dim / 2, which are of the same slot.
  template <class Byte>
  void store_numbers(uint8_t* upper, uint8_t* lower, const uint8_t* numbers, const Byte& byte) const {
    if (stored_dim_ == dim_) {
      for (int i = 0; i < dim_; ++i) upper[byte(i)] = (uint8_t)(numbers[i] ^ 128);
      return;
    }
    for (int i = 0; i < stored_dim_; ++i) {
      const uint8_t a = numbers[i], b = numbers[i + stored_dim_];
      if (cache_.bits == 4) {
        upper[byte(i)] = (uint8_t)(a | b << 4);
      } else {
        upper[byte(i)] = (uint8_t)(a >> 4 | (b & 0xF0));
        lower[byte(i)] = (uint8_t)((a & 15) | b << 4);
      }
    }
  }

  void copy_part(const uint8_t* from_keys, const uint8_t* from_values, size_t source, uint8_t* keys, uint8_t* values,
                 size_t target) const {
    const int words = stored_dim_ / C::kDepth, word_bytes = C::kDepth * number_bytes_, step = kLanes * word_bytes;
    const auto key = [&](size_t place) {
      return (place / kLanes * words * kLanes + place % kLanes) * C::kDepth * number_bytes_;
    };
    for (int w = 0; w < words; ++w)
      std::memcpy(keys + key(target) + w * step, from_keys + key(source) + w * step, (size_t)word_bytes);
    const auto value = [&](size_t place) {
      return (place / C::kDepth * stored_dim_ * C::kDepth + place % C::kDepth) * number_bytes_;
    };
    for (int i = 0; i < stored_dim_; ++i)
      std::memcpy(values + value(target) + i * word_bytes, from_values + value(source) + i * word_bytes,
                  (size_t)number_bytes_);
  }

  // Words of `count` runs of numbers, of so many vectors each, from one of the stored numbers on; meanwhile as many
  // bytes from `ahead` on are prefetched. Of a run in halves, vector i lies beside vector i + vectors / 2.
  const uint32_t* widen(const uint8_t* upper, const uint8_t* lower, size_t first, int count, int vectors,
                        uint32_t* out, const char* ahead) const {
    const bool whole = stored_dim_ == dim_;
    const int stored = whole ? vectors : vectors / 2;
    for (int run = 0; run < count; ++run, out += (size_t)vectors * kLanes)
      for (int i = 0; i < stored; ++i, first += kVector, ahead += kVector) {
        __builtin_prefetch(ahead, 0, 2);
        if (whole) {
          store(out + (size_t)i * kLanes, C::from_int8((const int8_t*)upper + first));
          continue;
        }
        Word low, high;
        pair(upper, lower, first, low, high);
        store(out + (size_t)i * kLanes, low), store(out + (size_t)(i + stored) * kLanes, high);
      }
    return out - (size_t)count * vectors * kLanes;
  }

  // Two vectors of numbers whose halves lie in the same bytes.
  void pair(const uint8_t* upper, const uint8_t* lower, size_t first, Word& low, Word& high) const {
    if (reads_halves_) return C::from_nibbles(upper + first, low, high);
    int8_t a[kVector], b[kVector];
    for (int i = 0; i < kVector; ++i) {
      const uint8_t u = upper[first + i], l = lower[first + i];
      a[i] = (int8_t)((uint8_t)(u << 4 | (l & 15)) ^ 128), b[i] = (int8_t)((uint8_t)((u & 0xF0) | l >> 4) ^ 128);
    }
    low = C::from_int8(a), high = C::from_int8(b);
  }

  // 16 words of a group of values, from a dimension on.
  Word value_vector(const CacheHead& at, size_t group, int first) const {
    const size_t begin = group * stored_dim_ * C::kDepth;
    if (stored_dim_ == dim_) return C::from_int8((const int8_t*)at.values + begin + (size_t)first * C::kDepth);
    Word low, high;
    pair(at.values, at.low_values, begin + (size_t)(first % stored_dim_) * C::kDepth, low, high);
    return first < stored_dim_ ? low : high;
  }

  const Cache& cache_;
  const int kv_heads_, dim_, words_;
  const bool scaled_, two_parts_;
  const bool reads_halves_;  // reads 4 bits of a number
  const int stored_dim_;     // numbers of a head in bytes of their own, or half of them
  const int number_bytes_;
  const PackedGroups<C> packed_;
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
