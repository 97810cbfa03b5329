#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {

void embed_tokens(const EmbedTokens& op, Workers& workers) {
  const LaneKernels& kernels = active_kernels();
  by_rows(workers, op.rows, op.table.cols, [&](std::int64_t row) { kernels.embed_row(op, row); });
}

}  // namespace poise::cpu
