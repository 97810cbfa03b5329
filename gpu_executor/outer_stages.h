#pragma once
// The first and the last stage of an iteration: embedding, and the head with sampling. Their tables
// come once an iteration, into one of two sides, so that the next iteration's arrive while this one
// computes. The head runs for all mini-batches at once, chunk by chunk; results leave while the next
// chunk is computed. Belongs to the pipeline, and is used by its thread alone.

#include <array>
#include <cstdint>
#include <memory>

#include "gpu_executor/device.h"
#include "gpu_executor/running_orders.h"
#include "gpu_executor/stage_parts.h"
#include "gpu_executor/work.h"

namespace poise {

class OuterStages {
 public:
  OuterStages(const StageParts& parts, const DeviceSizes& sizes);

  void run_embedding(RunningOrder& order, const LayerOrderWork& work);
  void run_head(RunningOrder& order, const LayerOrderWork& work);
  // Places of the iteration's rows on the device, for its layers; null where the model turns no heads. Valid
  // from its embedding on, until `read_by_layer` says for the last time that a layer's launches are queued.
  const RotaryPlace* places(const IterationWork& work) const;
  void read_by_layer(const IterationWork& work);

 private:
  // Half of the tables for embedding and head; an iteration holds one.
  struct IterationSide {
    Buffer tables;
    std::unique_ptr<Event> loaded;    // copy_in
    std::unique_ptr<Event> computed;  // compute: nothing reads the side any more
  };
  // Half of the samples of the head's chunks.
  struct SampleSide {
    Buffer sampled, edits;
    std::unique_ptr<Event> made, taken;  // compute, copy_out
    std::unique_ptr<Event> edits_there;  // copy_in
  };

  void bring_edits(const IterationWork& work, const HeadChunk& chunk, SampleSide& side);
  void compute_head(const IterationWork& work, const HeadChunk& chunk, SampleSide& side,
                    const std::byte* table, std::int64_t first_result);

  const StageParts parts_;
  std::array<IterationSide, 2> sides_;
  std::array<SampleSide, 2> sample_sides_;
  std::uint64_t iterations_ = 0;
};

}  // namespace poise
