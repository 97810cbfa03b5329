#include <algorithm>

#include "common/trouble.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Columns of an absorbed query in one work item. Bits do not depend on it.
constexpr std::int32_t kAbsorbedColumns = 128;

void check_sizes(const AbsorbedAttention& op) {
  const Attention& attention = op.attention;
  check(attention.head_dim >= 1 && attention.head_dim <= kMaxHeadDim, "a head is 1 to 256 wide");
  check(attention.kv_heads >= 1 && attention.heads % attention.kv_heads == 0,
        "query heads share key-value heads evenly");
  check(op.w_kv.cols >= 1 && op.w_kv.cols <= kMaxNormedRow,
        "an attention input has at most 16384 numbers");
  check(op.w_kv.rows == 2 * attention.kv_heads * attention.head_dim &&
            !op.w_kv.packed.is_packed() && op.w_kv.dtype == attention.dtype,
        "plain W_K and W_V of the stored type are absorbed");
  check(attention.format == KvFormat::plain && attention.row_dtype == DType::float32 &&
            attention.window == 0,
        "absorbed attention reads plain blocks and float32 queries, without a window");
  check(op.scratch_rows >= 1, "absorbed attention has room for a row");
}

// All sequences at once: there is room for their rows.
void attend(const AbsorbedAttention& op, Workers& workers) {
  const LaneKernels& kernels = active_kernels();
  const auto slice = [&](int worker) {
    return AbsorbedSlice{.op = &op,
                         .sequences = op.attention.sequence_count,
                         .scratch = reinterpret_cast<float*>(workers.scratch(worker))};
  };
  const std::int64_t parts = ceil_div(op.w_kv.cols, kAbsorbedColumns);
  workers.parallel_for(op.attention.kv_heads * parts, [&](std::int64_t item, int worker) {
    AbsorbedSlice one = slice(worker);
    one.kv_head = static_cast<std::int32_t>(item / parts);
    one.first_column = static_cast<std::int32_t>(item % parts) * kAbsorbedColumns;
    one.columns = std::min(kAbsorbedColumns, op.w_kv.cols - one.first_column);
    kernels.absorb_queries(one);
  });
  const std::int64_t heads = op.attention.heads, tiles = ceil_div(heads, kernels.tile_rows);
  workers.parallel_for(op.attention.sequence_count * tiles, [&](std::int64_t item, int worker) {
    AbsorbedSlice one = slice(worker);
    one.sequence = static_cast<std::int32_t>(item / tiles);
    one.first_head = static_cast<std::int32_t>(heads * (item % tiles) / tiles);
    one.heads = static_cast<std::int32_t>(heads * (item % tiles + 1) / tiles) - one.first_head;
    kernels.absorbed_slice(one);
  });
  workers.parallel_for(op.attention.kv_heads, [&](std::int64_t item, int worker) {
    AbsorbedSlice one = slice(worker);
    one.kv_head = static_cast<std::int32_t>(item);
    kernels.absorbed_values(one);
  });
}

}  // namespace

void absorbed_attention(const AbsorbedAttention& op, Workers& workers) {
  static_assert(kAbsorbedScratchFloats * 4 <= Workers::kScratch.n);
  if (op.attention.sequence_count <= 0) {
    return;
  }
  check_sizes(op);
  AbsorbedAttention some = op;
  for (std::int32_t left = op.attention.sequence_count; left > 0; left -= op.scratch_rows) {
    some.attention.sequence_count = std::min(op.scratch_rows, left);
    attend(some, workers);
    some.attention.sequences += some.attention.sequence_count;
  }
}

}  // namespace poise::cpu
