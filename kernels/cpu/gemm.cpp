#include <algorithm>
#include <array>

#include "common/trouble.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

constexpr int kMaxWorkers = 256;

// The output cut into slices: blocks of rows whose packed inputs stay in a core's L2, times chunks
// of panels. Bits do not depend on it.
struct Cut {
  std::int64_t row_blocks, chunks;

  Cut(const Gemm& op, std::int64_t tile_rows, int threads) {
    constexpr std::int64_t kCacheFloats = 1 << 17;
    const std::int64_t cols = std::max(1, op.weight.cols);
    std::int64_t most = std::clamp(kCacheFloats / cols / tile_rows * tile_rows, tile_rows,
                                   kGemmRows / tile_rows * tile_rows);
    most = std::min(most, kGemmPackedFloats / cols);
    row_blocks = ceil_div(op.rows, most);
    // Enough slices that the last ones end together, chunks wide enough to earn their packing.
    const std::int64_t panels = panel_count(op.weight.rows);
    const std::int64_t wanted = ceil_div(8 * threads, row_blocks);
    const std::int64_t width =
        std::min(round_up(ceil_div(panels, wanted), op.rows <= 3 ? 8 : 4), kGemmPanels);
    chunks = ceil_div(panels, width);
  }
};

}  // namespace

void gemm(const Gemm& op, Workers& workers) {
  if (op.rows <= 0 || op.weight.rows <= 0) {
    return;
  }
  check(op.out.stride >= op.weight.rows && op.in.stride >= op.weight.cols,
        "a Gemm's rows are as wide as its weight says");
  check(op.weight.cols >= 0 && op.weight.cols <= kGemmPackedFloats,
        "a Gemm has at most 786432 inputs");
  check(!op.weight.packed.is_packed() || op.weight.rows % kPackedRows == 0,
        "a packed weight has whole panels");
  check(workers.threads() <= kMaxWorkers, "a pool has at most 256 workers");
  static_assert(4 * (kGemmPackedFloats + kGemmSumsFloats + kGemmWideFloats) <= Workers::kScratch.n);
  const LaneKernels& kernels = active_kernels();
  const Cut cut(op, kernels.tile_rows, workers.threads());
  const std::int64_t panels = panel_count(op.weight.rows);
  std::array<std::int64_t, kMaxWorkers> packed_block;  // which rows a worker holds packed
  std::fill_n(packed_block.begin(), workers.threads(), -1);

  const auto slice = [&](std::int64_t item, int worker) {
    const std::int64_t block = item / cut.chunks;
    const std::int64_t chunk = item % cut.chunks;
    const std::int64_t row = op.rows * block / cut.row_blocks;
    const std::int64_t panel = panels * chunk / cut.chunks;
    const std::int64_t next_chunk = (chunk + workers.threads()) % cut.chunks;
    auto* scratch = reinterpret_cast<float*>(workers.scratch(worker));
    std::int64_t& held = packed_block[static_cast<std::size_t>(worker)];
    kernels.gemm_slice({.op = &op,
                        .first_row = row,
                        .rows = op.rows * (block + 1) / cut.row_blocks - row,
                        .first_panel = panel,
                        .panels = panels * (chunk + 1) / cut.chunks - panel,
                        .next_panel = panels * next_chunk / cut.chunks,
                        .packed = scratch,
                        .sums = scratch + kGemmPackedFloats,
                        .wide = scratch + kGemmPackedFloats + kGemmSumsFloats,
                        .is_packed = held == block});
    held = block;
  };
  constexpr std::int64_t kWorthHandingOut = 1 << 17;  // multiply-adds
  const std::int64_t items = cut.row_blocks * cut.chunks;
  if (op.rows * op.weight.rows * op.weight.cols < kWorthHandingOut) {
    workers.inline_for(items, slice);
  } else {
    workers.parallel_for(items, slice);
  }
}

}  // namespace poise::cpu
