#pragma once
// Sequences that host cores attend, in a decoder layer: queries and new rows of keys and values go down,
// the host threads put the new rows into their blocks and attend those where they lie, and the output
// comes up. K and V of their context never cross the link. All of a group go down together, as soon as
// its queries are made, so the host cores have the time in which the device attends the group's other
// mini-batches. Where they have a group of their own (prompts beside them fill the others), its queries are the
// layer's first, and the device computes all other groups before their output comes up (sent_ahead):
//
//   copy out  |      queries, new rows of all | …
//   host      |                               attention of mb 2 | of mb 3 |
//   compute   | QKV of all rows | attention of mb 0 | of mb 1 | output of 2 | of 3 | projection, MLP
//
//   - they go down behind all stores of the layer so far, which the host cores may read;
//   - the device's loads of a layer wait for the rows that host cores wrote there;
//   - one set of host buffers is enough: a group's queries are made behind the output of the group of host cores before.
// The output comes up on the compute stream, read by the GPU's threads: on copy_in, weights would wait behind it, and a copy
// engine would bring it only behind all loads that were queued before (1.9 ms a layer of 11, OPT-6.7B on an H100).
// Belongs to the pipeline, and is used by its thread alone.

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "common/device_memory.h"
#include "gpu_executor/block_copies.h"
#include "gpu_executor/stage_parts.h"
#include "gpu_executor/work.h"

namespace poise {

class HostAttentionStage {
 public:
  HostAttentionStage(const StageParts& parts, DType dtype, const DeviceLimits& limits);

  // Before the layer's first loads.
  void wait_for_writes(LayerId layer);
  // Those of a group's mini-batches that host cores attend; its queries and new rows are queued.
  void send(RunningOrder& order, std::span<const Visit> visits, const RowsSide& side,
            LayerId layer);
  // Before the device makes other queries and new rows where those that were sent lie.
  void wait_until_down();
  // The output of one of them to the rows of the group. REQUIRES: it was sent.
  void receive(RunningOrder& order, const Visit& visit);

 private:
  void copy_down(RunningOrder& order, std::span<const Visit> visits, const RowsSide& side);
  HostAttention work_of(const IterationWork& iteration, const Visit& visit, LayerId layer) const;
  void* rows(const HostBuffer& buffer, Bytes row, std::int64_t first) const {
    return buffer.data() + row.n * first;
  }

  const StageParts parts_;
  const BlockSizes sizes_;
  const Bytes q_row_;             // of queries, and of attention's output
  HostBuffer q_, kv_, attended_;  // (max_mini_batch_rows) rows of each
  std::unique_ptr<Event> queries_made_, down_;
  std::map<std::uint32_t, std::unique_ptr<Event>> attended_of_;  // host, by mini-batch
  std::vector<std::unique_ptr<Event>> written_;                  // host, by layer: its last rows
};

}  // namespace poise
