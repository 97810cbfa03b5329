#pragma once
// Distributes rows over workers, for operations that compute one row at a time: in groups large
// enough to pay for it, and on the calling thread alone if there are few rows.

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/workers.h"

namespace poise::cpu {

// fn(row) for each row in [0, rows); `elements` is how many numbers one row handles.
template <typename Fn>
void by_rows(Workers& workers, std::int64_t rows, std::int64_t elements, Fn fn) {
  constexpr std::int64_t kGroupElements = 32768;  // some ten microseconds
  const std::int64_t group =
      std::max<std::int64_t>(1, kGroupElements / std::max<std::int64_t>(1, elements));
  workers.parallel_for((rows + group - 1) / group, [&](std::int64_t item, int) {
    const std::int64_t end = std::min(rows, (item + 1) * group);
    for (std::int64_t row = item * group; row < end; ++row) {
      fn(row);
    }
  });
}

}  // namespace poise::cpu
