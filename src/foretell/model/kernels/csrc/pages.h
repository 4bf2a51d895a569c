// Pages of keys, of which a decoded token attends to those that may matter most to it (Quest, arXiv 2406.10774).
//
// A page has kPage slots. The least and the greatest number per dimension of its keys give an upper bound of a query's
// scores in it. A token attends to the first page, to the slots from `optional_slots` on, and to the pages between with
// the highest bounds. How many these are depends on the token's position alone, and which, on its queries and on its
// text: a token's numbers do not depend on what else is in the pass.
//
// The numbers of the pages of a cache block lie as [word of the head][page][number of the word].

#pragma once

#include <algorithm>

#include "attention_products.h"
#include "cache.h"
#include "interface.h"
#include "precisions.h"

namespace {

constexpr int kPage = kLanes, kBlockPages = kCacheBlock / kPage;
constexpr int kRecentSlots = 64;  // `RECENT` of page_bounds.py

// The first slots of a row, whole pages, which a token may leave out.
inline int optional_slots(const Cache& cache, int position, int prefix) {
  if (!cache.page_budget) return 0;
  return std::max(0, std::min(position + 1 - kRecentSlots, prefix)) / kPage * kPage;
}

// The pages of the optional slots that a token attends to.
inline int kept_pages(const Cache& cache, int position, int optional) {
  const int recent = (position + kPage) / kPage - optional / kPage;
  return std::max(1, std::min(optional / kPage, cache.page_budget / kPage - recent));
}

// C: precision of the words that attention multiplies.
template <class C>
class Pages {
 public:
  Pages(const Cache& cache, const CacheLayout<C>& layout, int head_dim)
      : cache_(cache), layout_(layout), dim_(head_dim), words_(head_dim / C::kDepth) {}

  bool any() const { return cache_.page_budget > 0; }
  // Most pages of a token.
  int budget() const { return cache_.page_budget / kPage; }
  int optional_for(int position, int prefix) const { return optional_slots(cache_, position, prefix); }
  // The first slots of a row whose bounds are known in all layers.
  int known_slots(int row) const { return cache_.page_slots[row]; }

  // Words of scratch memory that a thread needs for texts of so many slots.
  size_t scratch_words(int slots) const {
    return any() ? (size_t)round_up(slots, kPage) / kPage * 2 + 2 * (size_t)kStep * words_ : 0;
  }

  // Notes the bounds of the page from a slot on, whose keys are stored.
  void note(const CacheHead& at, int slot, uint32_t* scratch) const {
    float least[kMaxHeadDim], most[kMaxHeadDim];
    const uint32_t* keys = layout_.key_words(at, slot, 1, 0, scratch, (const char*)scratch);
    float ones[kLanes];
    std::fill(ones, ones + kLanes, 1.0f);
    layout_.scale_scores(at, slot, 1, ones);
    const Float scale = load<Float>(ones);
    for (int i = 0; i < dim_; ++i) {
      const Float numbers = C::number(load<Word>(keys + (size_t)(i / C::kDepth) * kLanes), i % C::kDepth) * scale;
      most[i] = largest(numbers), least[i] = -largest(-numbers);
    }
    store_words(bounds_at(at.least, at, slot), slot, least);
    store_words(bounds_at(at.most, at, slot), slot, most);
  }

  // The numbers of `kept` of the first `count` pages, ascending: of page 0 and of those with the highest bounds, of
  // equal ones the first. parts: of every query head the words of its positive numbers, then of its negative ones.
  void select(const CacheHead& at, int count, int kept, const Rows& parts, int heads, uint32_t* scratch,
              int32_t* out) const {
    float* bounds = (float*)scratch;
    int32_t* order = (int32_t*)scratch + count;
    uint32_t* words = scratch + 2 * (size_t)count;
    for (int first = 0; first < count; first += kStep) bound_step(at, first, count, parts, heads, words, bounds);
    for (int i = 0; i < count; ++i) order[i] = i;
    const auto before = [&](int a, int b) { return bounds[a] > bounds[b] || (bounds[a] == bounds[b] && a < b); };
    bounds[0] = INFINITY;
    std::nth_element(order, order + kept - 1, order + count, before);
    std::sort(order, order + kept);
    std::copy(order, order + kept, out);
  }

 private:
  static constexpr int kStep = kTileVectors * kLanes;  // pages whose bounds are computed together

  const uint32_t* bounds_at(const uint8_t* all, const CacheHead& at, int slot) const {
    return (const uint32_t*)all + (size_t)at.table[slot / kCacheBlock] * kBlockPages * words_;
  }
  void store_words(const uint32_t* block, int slot, const float* x) const {
    uint32_t words[kMaxHeadDim], *out = (uint32_t*)block + slot % kCacheBlock / kPage;
    C::pack(x, dim_, words);
    for (int w = 0; w < words_; ++w) out[(size_t)w * kBlockPages] = words[w];
  }

  // The bounds of pages from a multiple of kStep on: the sum over dimensions of the larger product of the query with
  // the least and the greatest number, the largest over the query heads.
  void bound_step(const CacheHead& at, int first, int count, const Rows& parts, int heads, uint32_t* words,
                  float* bounds) const {
    const int pages = std::min(kStep, count - first), vectors = (pages + kLanes - 1) / kLanes;
    uint32_t* least = words + (size_t)kStep * words_;
    gather(at.most, at, first, pages, words), gather(at.least, at, first, pages, least);
    const size_t apart = (size_t)words_ * kLanes;
    std::fill(bounds + first, bounds + first + pages, -INFINITY);
    for (int h = 0; h < heads; h += kTileQueries) {
      const int some = std::min(kTileQueries, heads - h);
      float sums[kTileQueries][kStep], *out[kTileQueries];
      const uint32_t *positive[kTileQueries], *negative[kTileQueries];
      for (int q = 0; q < some; ++q) {
        positive[q] = parts.words + 2 * (size_t)(h + q) * parts.stride;
        negative[q] = positive[q] + parts.stride, out[q] = sums[q];
      }
      const auto multiply = column_product<C>(some, vectors);
      multiply({words, kLanes, apart}, words_, positive, false, out, nullptr);
      multiply({least, kLanes, apart}, words_, negative, true, out, nullptr);
      for (int q = 0; q < some; ++q)
        for (int i = 0; i < pages; ++i) bounds[first + i] = std::max(bounds[first + i], sums[q][i]);
    }
  }

  // The words of pages from a multiple of kStep on: [vector][word][page].
  void gather(const uint8_t* all, const CacheHead& at, int first, int pages, uint32_t* out) const {
    for (int i = 0; i < pages; i += kBlockPages) {
      const uint32_t* block = bounds_at(all, at, (first + i) * kPage);
      uint32_t* words = out + (size_t)(i / kLanes) * words_ * kLanes + i % kLanes;
      for (int w = 0; w < words_; ++w)
        std::memcpy(words + (size_t)w * kLanes, block + (size_t)w * kBlockPages, 4 * kBlockPages);
    }
  }

  const Cache& cache_;
  const CacheLayout<C>& layout_;
  const int dim_, words_;
};

}  // namespace
