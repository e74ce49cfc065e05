// How a function of the library divides its work among threads, and memory that it uses again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pool.h"

#define API extern "C" __attribute__((visibility("default")))

namespace whorl {

// Work that is worth a thread, in products of two numbers or in bytes of weights: a few microseconds.
constexpr int64_t WORTH = 48 << 10;

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pieces that `count` units of this much work are cut into: enough that threads end together.
inline int64_t pieces(int64_t count, int64_t work) {
  const int64_t most = std::max<int64_t>(1, count * work / WORTH);
  return std::min({count, most, int64_t(num_threads()) * (work * count > 64 * WORTH ? 8 : 3)});
}

// Calls function(first, last) for ranges of [0, count).
template <class Function>
void ranges(int64_t count, int64_t work, const Function& function) {
  const int64_t parts = count ? pieces(count, work) : 0;
  parallel(parts, [&](int64_t i) { function(count * i / parts, count * (i + 1) / parts); });
}

template <class T>
struct Scratch {  // memory of the calling thread, used again by the next call
  std::vector<T> memory;
  T* get(int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(count);
    return memory.data();
  }
};

}  // namespace whorl
