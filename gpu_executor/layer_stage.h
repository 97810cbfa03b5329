#pragma once
// A decoder layer's stage, queued so that copies in, computation and copies out overlap:
//
//   copy in   | tables, ACT | KV of mb 0 | W pieces | ACT | KV of mb 1 | …     never idle
//   compute   | QKV of all rows | KV Gen, attention of mb 0 | … of mb 1 | … | projection, MLP
//   copy out  |       new K/V/ACT rows of all | …
//
// What is computed row by row runs once for a group of mini-batches (common/row_groups.h); KV Gen and
// attention go mini-batch by mini-batch. Each launch waits for what it reads alone: KV Gen for its ACT
// blocks and W_K, W_V, attention also for its KV blocks, a product for the pieces its weight is in;
// and for the stores of the rows that it overwrites. The order of launches is that in which the link
// brings what they read: where W_Q comes behind the first mini-batch's blocks, KV Gen comes before the
// queries (KVPR section 3.3). Mini-batches that host cores attend come last of all, but where they are a group of
// their own, its queries go to the host cores first (host_attention/host_attention_stage.h). Belongs to the pipeline, and is used by its thread alone.

#include <span>
#include <vector>

#include "common/row_groups.h"
#include "common/weight_layout.h"
#include "gpu_executor/block_copies.h"
#include "gpu_executor/decoder.h"
#include "gpu_executor/host_attention/host_attention_stage.h"
#include "gpu_executor/stage_parts.h"
#include "gpu_executor/work.h"

namespace poise {

class LayerStage {
 public:
  LayerStage(const StageParts& parts, BlockCopies& copies, DType dtype, const DeviceLimits& limits,
             const WeightLayout& layout, const DeviceSizes& sizes);

  // `places`: of all rows of the iteration, on the device, in models that turn heads.
  void run(RunningOrder& order, const LayerOrderWork& work, LayerId layer,
           const RotaryPlace* places);

 private:
  std::vector<RowGroup> group(std::span<Visit> visits) const;
  LayerRows rows_of(const Visit& first, const RowGroup& group, const RowsSide& side,
                    const RotaryPlace* places) const;
  LayerHooks hooks(std::uint32_t mini_batch, const RowsSide& side);
  LayerContext context_of(const Visit& visit, LayerId layer) const;
  void regenerate(const Visit& visit, const LayerWeights& weights, const LayerContext& context,
                  const RowsSide& side);
  void attend(const Visit& visit, const LayerWeights& weights, const LayerRows& rows,
              const LayerContext& context, const RowsSide& side);

  const StageParts parts_;
  BlockCopies& copies_;
  const DeviceLimits limits_;
  const WeightLayout layout_;
  HostAttentionStage host_;
  Buffer regenerated_;  // one: written and read by the compute stream alone
};

}  // namespace poise
