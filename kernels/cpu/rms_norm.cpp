#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void rms_norm(const RmsNorm& op, Workers& workers) {
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.rows, op.dim, [&](std::int64_t row) { kernels.rms_norm_row(op, row); });
}

}  // namespace poise::cpu
