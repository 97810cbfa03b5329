#include "kernels/cpu/packed_matrix.h"

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void pack_panels(void* dst, const void* src, std::int64_t rows, std::int64_t cols, DType dtype,
                 std::int64_t first, std::int64_t end) {
  const LaneKernels& kernels = active_kernels();
  for (std::int64_t panel = first; panel < end; ++panel) {
    kernels.pack_panel(dst, src, rows, cols, dtype, panel);
  }
}

void pack_matrix(void* dst, const void* src, std::int64_t rows, std::int64_t cols, DType dtype) {
  pack_panels(dst, src, rows, cols, dtype, 0, panel_count(rows));
}

}  // namespace poise::cpu
