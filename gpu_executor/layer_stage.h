#pragma once
// A decoder layer's stage, queued so that copies in, computation and copies out overlap:
//
//   copy in   | tables, ACT, KV of mb 0 | W pieces | ACT, KV of mb 1 | …     never idle
//   compute   | QKV of all rows | KV Gen, attention of mb 0 | … of mb 1 | … | projection, MLP
//   copy out  |       new K/V/ACT rows of all | …
//
// What is computed row by row runs once for a group of mini-batches (common/row_groups.h); KV Gen and
// attention go mini-batch by mini-batch. Computation waits for its loads, its weights' pieces, and for
// the stores of the rows it overwrites. Belongs to the pipeline, and is used by its thread alone.

#include <span>
#include <vector>

#include "common/row_groups.h"
#include "gpu_executor/block_copies.h"
#include "gpu_executor/decoder.h"
#include "gpu_executor/stage_parts.h"
#include "gpu_executor/work.h"

namespace poise {

class LayerStage {
 public:
  LayerStage(const StageParts& parts, BlockCopies& copies, const DeviceLimits& limits,
             std::int32_t layers, const DeviceSizes& sizes);

  void run(RunningOrder& order, const LayerOrderWork& work, LayerId layer);

 private:
  std::vector<RowGroup> group(std::span<Visit> visits) const;
  LayerRows rows_of(const Visit& first, const RowGroup& group, const RowsSide& side) const;
  LayerHooks hooks(std::uint32_t mini_batch, const RowsSide& side);
  void attend(const Visit& visit, LayerId layer_id, const LayerWeights& weights,
              const LayerRows& rows, const RowsSide& side);

  const StageParts parts_;
  BlockCopies& copies_;
  const DeviceLimits limits_;
  const std::int32_t layers_;
  Buffer regenerated_;  // one: written and read by the compute stream alone
};

}  // namespace poise
