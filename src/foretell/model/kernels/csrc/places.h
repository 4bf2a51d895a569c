// Rows of neurons that lie in memory or in a mapped file; see `NeuronPlaces` in interface.h.
//
// The pages of the file that a pass needs are asked for together, so that the system reads them side by side, and are
// given back after the layer, so that they take no memory.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#endif

#include "interface.h"

namespace {

enum RecordRow { kUpRow = 0, kDownRow = 1, kGateRow = 2 };

constexpr size_t kFilePage = 4096;
constexpr size_t kReadThrough = 32768;  // bytes between two neurons that are read rather than asked for apart

// A row of a neuron, of row_words words.
inline const uint32_t* record_row(const NeuronPlaces& p, int neuron, RecordRow row, size_t row_words) {
  const int place = p.place[neuron];
  const uint32_t* records = place < p.hot ? p.hot_records : p.file_records;
  return records + (size_t)place * (size_t)p.record_words + row * row_words;
}

inline bool is_in_file(const NeuronPlaces& p, int neuron) { return p.place[neuron] >= p.hot; }

// Asks for bytes begin .. end - 1 of the records of the file; returns how many bytes of pages these are.
inline int64_t ask_for(const NeuronPlaces& p, size_t begin, size_t end) {
  begin = begin / kFilePage * kFilePage;
  end = (end + kFilePage - 1) / kFilePage * kFilePage;
#if defined(__linux__)
  madvise((char*)p.file_records + begin, end - begin, MADV_WILLNEED);
#endif
  return (int64_t)(end - begin);
}

// Asks for the records of the chosen neurons whose places are first .. last - 1, all of them in the file.
inline void ask_for_chosen(const NeuronPlaces& p, const int32_t* chosen, int first, int last) {
  const size_t size = 4 * (size_t)p.record_words;
  size_t begin = 0, end = 0;
  int64_t numbers[3] = {};
  const auto ask = [&] {
    if (end == 0) return;
    ++numbers[1];
    numbers[2] += ask_for(p, begin, end);
  };
  for (int place = first; place < last; ++place) {
    if (!chosen[p.neuron[place]]) continue;
    ++numbers[0];
    const size_t at = (size_t)place * size;
    if (end == 0 || at - end > kReadThrough) ask(), begin = at;
    end = at + size;
  }
  ask();
  for (int i = 0; i < 3; ++i) __atomic_fetch_add(p.counts + i, numbers[i], __ATOMIC_RELAXED);
}

// Gives the pages of the neurons in the file back to the system.
inline void give_back(const NeuronPlaces& p, int neurons) {
#if defined(__linux__)
  const size_t size = 4 * (size_t)p.record_words;
  const size_t begin = (size_t)p.hot * size / kFilePage * kFilePage, end = (size_t)neurons * size;
  if (begin >= end) return;
  madvise((char*)p.file_records + begin, end - begin, MADV_DONTNEED);
  posix_fadvise(p.file, p.offset + (int64_t)begin, (int64_t)(end - begin), POSIX_FADV_DONTNEED);
#endif
}

}  // namespace
