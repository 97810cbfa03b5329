#include "common/trouble.h"
#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void quantize_kv(const QuantizeKv& op, Workers& workers) {
  check(op.head_dim >= 1 && op.head_dim <= kMaxHeadDim, "a head is 1 to 256 wide");
  check(op.format != KvFormat::plain, "plain rows are not quantised");
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.rows, 2 * std::int64_t{op.kv_heads} * op.head_dim,
          [&](std::int64_t row) { kernels.quantize_kv_row(op, row); });
}

}  // namespace poise::cpu
