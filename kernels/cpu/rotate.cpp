#include "common/trouble.h"
#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void rotate(const Rotate& op, Workers& workers) {
  check(op.head_dim >= 1 && op.head_dim <= kMaxHeadDim, "a head is 1 to 256 wide");
  check(op.rotary_dim >= 0 && op.rotary_dim <= op.head_dim && op.rotary_dim % 2 == 0,
        "an even part of a head is rotated");
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.rows, std::int64_t{op.heads} * op.head_dim,
          [&](std::int64_t row) { kernels.rotate_row(op, row); });
}

}  // namespace poise::cpu
