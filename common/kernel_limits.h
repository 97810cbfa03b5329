#pragma once
// What the kernels of both devices compute at most. A model beyond these is refused when its config is read
// (common/families/), not in the middle of a run. Sizes without a limit here are bounded by memory alone.

#include <cstdint>

namespace poise {

inline constexpr std::int32_t kMaxNormedRow = 1 << 14;  // numbers that one norm covers: hidden_size
inline constexpr std::int32_t kMaxHeadDim = 256;

// AbsorbedAttention (kernels/kernels.h): what it keeps of one row's query head, in float32, and for how many
// rows the executor has room at least. Some numbers for each input, column of the head and position of the longest
// context, and sixteen; what they are is the device's affair.
constexpr std::int64_t absorbed_row_floats(std::int32_t hidden_size, std::int32_t head_dim,
                                           std::int32_t max_context) {
  const auto padded = [](std::int64_t count) { return (count + 15) / 16 * 16; };
  return padded(hidden_size) + 16 + padded(head_dim) + padded(max_context);
}
inline constexpr std::int32_t kAbsorbedRows = 32;

}  // namespace poise
