#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void gated_activation(const GatedActivation& op, Workers& workers) {
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.rows, 2 * std::int64_t{op.dim},
          [&](std::int64_t row) { kernels.gated_activation_row(op, row); });
}

}  // namespace poise::cpu
