#pragma once
// What the kernels of both devices compute at most. A model beyond these is refused when its config is read
// (common/families/), not in the middle of a run. Sizes without a limit here are bounded by memory alone.

#include <cstdint>

namespace poise {

inline constexpr std::int32_t kMaxNormedRow = 1 << 14;  // numbers that one norm covers: hidden_size
inline constexpr std::int32_t kMaxHeadDim = 256;

}  // namespace poise
