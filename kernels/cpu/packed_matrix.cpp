#include "kernels/cpu/packed_matrix.h"

#include "common/trouble.h"
#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
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

void unpack(const Unpack& op, Workers& workers) {
  check(op.weight.packed.is_packed() && op.weight.rows % kPackedRows == 0,
        "what is unpacked is packed, in whole panels");
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.weight.rows / kPackedRows, std::int64_t{kPackedRows} * op.weight.cols,
          [&](std::int64_t panel) { kernels.unpack_panel(op, panel); });
}

}  // namespace poise::cpu
