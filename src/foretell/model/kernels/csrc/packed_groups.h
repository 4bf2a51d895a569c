// Keys and values of few bits in groups of tokens (KIVI, arXiv 2402.02750).
//
// A group has kGroupSlots slots. Its keys are rounded per dimension over the slots, its values per slot over
// kGroupSlots dimensions: number = least + level * step, both bfloat16, in one range word (least in the lower half).
// Newer keys and values are kept whole beside them. A token reads a group where all of it lies `packed_residual`
// positions or more before the token, else its whole numbers. That depends on the token's position alone, so a
// token's numbers do not depend on what else is in the pass.
//
// A level is a lane of a vector of 16 bytes, a byte holds the levels of as many vectors as fit. Vector 2 * d + h of
// keys has dimension d of slots 16 * h .. 16 * h + 15; vector s * dim / 16 + i of values has dimensions 16 * i .. of
// slot s.

#pragma once

#include "interface.h"
#include "precisions.h"

namespace {

constexpr int kGroupSlots = 32;  // `GROUP_SLOTS` of packed_groups.py

// The first slots of a row, a multiple of kGroupSlots, of which a token reads the packed numbers.
inline int packed_slots_for(const Cache& cache, int position, int prefix) {
  if (!cache.packed_bits) return 0;
  return std::max(0, std::min(position - cache.packed_residual, prefix)) / kGroupSlots * kGroupSlots;
}

// The part of the packed groups that belongs to one key-value head of a layer, as a row sees it.
struct PackedHead {
  uint8_t *keys, *values;
  uint32_t *key_ranges, *value_ranges;
  const int32_t* table;
};

// C: precision of the words that attention multiplies.
template <class C>
class PackedGroups {
 public:
  PackedGroups(const Cache& cache, int kv_heads, int head_dim)
      : cache_(cache),
        kv_heads_(kv_heads),
        dim_(head_dim),
        bits_(cache.packed_bits),
        byte_shift_(bits_ == 2 ? 2 : 1) {}

  bool any() const { return bits_ > 0; }

  PackedHead head(int layer, int row, int kv) const {
    if (!any()) return {};
    const size_t i = ((size_t)layer * kv_heads_ + kv) * cache_.packed_blocks * kBlockGroups;
    return {(uint8_t*)cache_.k_packed + i * group_bytes(), (uint8_t*)cache_.v_packed + i * group_bytes(),
            (uint32_t*)cache_.k_range + i * dim_, (uint32_t*)cache_.v_range + i * dim_,
            cache_.packed_table + (size_t)row * cache_.packed_row_blocks};
  }

  int slots_for(int position, int prefix) const { return packed_slots_for(cache_, position, prefix); }
  // The first slots of a row that are packed in all layers.
  int packed_slots(int row) const { return cache_.packed_slots[row]; }

  // Packs the keys of the group from a slot on. key(h, d): dimension d of 16 slots from slot + 16 * h on.
  template <class Key>
  void pack_keys(const PackedHead& at, int slot, const Key& key) const {
    const size_t group = group_of(at, slot);
    Writer out(at.keys + group * group_bytes(), bits_);
    for (int d = 0; d < dim_; ++d) {
      const Float a = key(0, d), b = key(1, d);
      const Range range = range_of(a, b);
      at.key_ranges[group * dim_ + d] = range.word;
      out.add(levels(a, range)), out.add(levels(b, range));
    }
  }

  // Packs the values of the group from a slot on. value(s, i): dimensions 16 * i .. of slot + s.
  template <class Value>
  void pack_values(const PackedHead& at, int slot, const Value& value) const {
    const size_t group = group_of(at, slot);
    Writer out(at.values + group * group_bytes(), bits_);
    uint32_t* ranges = at.value_ranges + group * dim_;
    for (int s = 0; s < kGroupSlots; ++s)
      for (int i = 0; i < dim_ / kLanes; i += 2) {
        const Float a = value(s, i), b = value(s, i + 1);
        const Range range = range_of(a, b);
        *ranges++ = range.word;
        out.add(levels(a, range)), out.add(levels(b, range));
      }
  }

  // The words of groups of 16 keys from a slot on: [group][word][key].
  void key_words(const PackedHead& at, int slot, int groups, uint32_t* out) const {
    bits_ == 4 ? widen_keys<4>(at, slot, groups, out) : widen_keys<2>(at, slot, groups, out);
  }

  // The words of the values of `count` slots of one block from a multiple of kGroupSlots on:
  // [slot / kDepth][dimension].
  void value_words(const PackedHead& at, int slot, int count, uint32_t* out) const {
    bits_ == 4 ? widen_values<4>(at, slot, count, out) : widen_values<2>(at, slot, count, out);
  }

 private:
  static constexpr int kBlockSlots = 64, kBlockGroups = kBlockSlots / kGroupSlots;  // kCacheBlock of cache.h

  template <int kBits>
  void widen_keys(const PackedHead& at, int slot, int groups, uint32_t* out) const {
    for (int g = 0; g < groups; ++g, slot += kLanes) {
      const size_t group = group_of(at, slot);
      const uint8_t* levels = at.keys + group * group_bytes();
      const uint32_t* ranges = at.key_ranges + group * dim_;
      const int half = (slot / kLanes) & 1;
      for (int d = 0; d < dim_; d += C::kDepth, out += kLanes) {
        Float numbers[C::kDepth];
        for (int i = 0; i < C::kDepth; ++i)
          numbers[i] = number<kBits>(levels, (size_t)(2 * (d + i) + half), ranges[d + i]);
        store(out, C::pack_columns(numbers));
      }
    }
  }

  template <int kBits>
  void widen_values(const PackedHead& at, int slot, int count, uint32_t* out) const {
    const int vectors = dim_ / kLanes;
    for (int s = 0; s < count; s += C::kDepth) {
      const size_t group = group_of(at, slot + s);
      const uint8_t* levels = at.values + group * group_bytes();
      const uint32_t* ranges = at.value_ranges + group * dim_;
      for (int i = 0; i < vectors; ++i, out += kLanes) {
        Float numbers[C::kDepth];
        for (int d = 0; d < C::kDepth; ++d) {
          const int of = (slot + s + d) & (kGroupSlots - 1);
          numbers[d] = number<kBits>(levels, (size_t)(of * vectors + i), ranges[of * (vectors / 2) + i / 2]);
        }
        store(out, C::pack_columns(numbers));
      }
    }
  }

  size_t group_bytes() const { return (size_t)kGroupSlots * dim_ >> byte_shift_; }
  size_t group_of(const PackedHead& at, int slot) const {
    return (size_t)at.table[slot / kBlockSlots] * kBlockGroups + slot % kBlockSlots / kGroupSlots;
  }

  struct Range {
    uint32_t word;
    float least, inverse;
  };
  static float least_of(uint32_t word) { return as_float(word << 16); }
  static float step_of(uint32_t word) { return as_float(word & 0xFFFF0000u); }
  static float as_float(uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }

  // Least number and step of 32 numbers.
  Range range_of(Float a, Float b) const {
    const float most = largest(larger(a, b)), least = -largest(larger(-a, -b));
    const uint32_t low = Bfloat16::round(least),
                   step = Bfloat16::round((most - as_float(low << 16)) / (float)((1 << bits_) - 1));
    const uint32_t word = low | step << 16;
    return {word, least_of(word), step_of(word) > 0 ? 1 / step_of(word) : 0};
  }

  Int levels(Float x, const Range& range) const {
    const Float most = splat((float)((1 << bits_) - 1));
    const Float level = smaller(larger((x - splat(range.least)) * splat(range.inverse), Float{}), most);
    return rounded_integer(level + splat(kRounder));
  }

  template <int kBits>
  static Float number(const uint8_t* levels, size_t vector, const uint32_t& range) {
    constexpr int kPerByte = 8 / kBits;
    const Int bytes = load_bytes<uint8_t>(levels + vector / kPerByte * kLanes);
    const Int level = (bytes >> (int)(vector % kPerByte * kBits)) & splat((1 << kBits) - 1);
    const Word both = splat(range);
    return fma(to_float(level), (Float)(both & splat(0xFFFF0000u)), (Float)(both << 16));
  }

  // Stores vectors of levels one after the other.
  struct Writer {
    Writer(uint8_t* out, int bits) : out_(out), bits_(bits) {}
    void add(Int level) {
      bytes_ |= level << shift_;
      if ((shift_ += bits_) < 8) return;
      store_bytes(out_, bytes_);
      out_ += kLanes, shift_ = 0, bytes_ = Int{};
    }
    uint8_t* out_;
    const int bits_;
    int shift_ = 0;
    Int bytes_ = {};
  };

  const Cache& cache_;
  const int kv_heads_, dim_, bits_;  // bits_ 0: nothing is packed
  const int byte_shift_;             // a byte holds 2^byte_shift_ levels
};

}  // namespace
