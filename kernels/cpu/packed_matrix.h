#pragma once
// How the CPU device keeps a weight matrix (Matrix::data): panels of 16 outputs, each (cols, 16),
// so that one load brings the sixteen weights that one input multiplies.
//
//   (ceil(rows / 16), cols, 16) of the stored type; rows past the end are zeros
//
// Rows [16·p, 16·p + 16) of the row-major source become panel p, independent of other rows. So a
// matrix may be packed in parts, by several threads, or as its rows arrive.

#include <cstdint>

#include "common/dtype.h"
#include "common/units.h"

namespace poise::cpu {

inline constexpr std::int32_t kPanelRows = 16;

constexpr std::int64_t panel_count(std::int64_t rows) { return ceil_div(rows, kPanelRows); }
constexpr Bytes packed_bytes(std::int64_t rows, std::int64_t cols, DType dtype) {
  return size_of(dtype) * (panel_count(rows) * kPanelRows * cols);
}

// dst: packed_bytes; src: (rows, cols) row-major. They must not overlap.
void pack_matrix(void* dst, const void* src, std::int64_t rows, std::int64_t cols, DType dtype);
// Only panels [first, end): reads source rows [16·first, 16·end), both pointers still the whole
// matrix's.
void pack_panels(void* dst, const void* src, std::int64_t rows, std::int64_t cols, DType dtype,
                 std::int64_t first, std::int64_t end);

}  // namespace poise::cpu
