#pragma once
// An Iteration message turned into what the pipeline runs: for each mini-batch its copies, and the
// tables its kernels read, packed so that one copy brings what a stage needs. Made only from
// messages that passed the order check; numbers are not checked again here.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/blocks.h"
#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "gpu_executor/decoder.h"
#include "gpu_executor/device.h"

namespace poise {

// The block pool of one epoch, as this process has it mapped.
struct HostBlocks {
  std::byte* data = nullptr;
  PoolPartition partition{};
};

// A contiguous part of the tables, copied as one. The offsets of its arrays count from its start,
// on the host and on the device.
struct TableSpan {
  std::int64_t offset = 0;
  Bytes bytes{};
};

// An array of a span, where its tables lie.
template <typename Record>
const Record* at(const std::byte* tables, std::int64_t offset) {
  return reinterpret_cast<const Record*>(tables + offset);
}

// What the embedding needs of the iteration's rows; the tables of the head stand in the same span.
struct IterationTable {
  TableSpan span;
  std::int64_t tokens = 0, positions = 0;  // (rows of the iteration)
  std::int64_t places = 0;                 // (rows of the iteration), models that turn heads
};

// The same sequences in one launch, where they stand one behind the other.
inline AttendedTogether both(const AttendedTogether& first, const AttendedTogether& second) {
  return {.count = first.count + second.count,
          .max_new_tokens = std::max(first.max_new_tokens, second.max_new_tokens),
          .max_context = std::max(first.max_context, second.max_context)};
}

// What one mini-batch needs in each layer.
struct LayerTable {
  TableSpan span;
  std::int64_t moves = 0;  // (kv_moves + regenerated_moves + here_moves + act_moves)
  std::int32_t kv_moves = 0, regenerated_moves = 0, here_moves = 0, act_moves = 0;
  // Of one row, then of several, then those that read activations as they are, which have one row.
  std::int64_t sequences = 0;
  AttendedTogether one_row, more_rows, absorbed;
  std::int64_t absorbed_positions = 0;  // of all absorbed sequences
  std::int64_t blocks = 0;              // (entries)
  // (slots from which keys are made again, block_tokens), models that turn heads
  std::int64_t act_places = 0;
};

// At most logits_rows rows of the head, of whatever mini-batches, and at most logit_edits edits.
struct HeadChunk {
  std::int64_t moves = 0;        // (rows)
  std::int64_t sample_rows = 0;  // (samples)
  std::int32_t rows = 0, samples = 0;
  TableSpan edits;  // of logits, which come with the chunk
};
struct BlockLoad {  // neighbouring blocks into neighbouring slots
  BlockKind kind;
  messages::Place place;
  std::uint32_t first_block, first_slot, count, tail_tokens;
  bool seen;  // in layers with a window, too (common/windows/unseen_blocks.h)
};

// What a mini-batch brings into a layer beside its loads.
struct BroughtBlocks {
  std::vector<Regenerate> regenerate;
  std::uint32_t kv = 0, act = 0;  // blocks that are loaded
};

struct RowStore {  // new rows into one block
  BlockKind kind;
  messages::Place place;
  std::uint32_t block, token, row, count;
};

// A row of the results: which sample it belongs to, and whether it is the logprob of a prompt's token.
struct ResultRow {
  std::uint32_t sample;
  bool prompt;
};

struct SampleWork {
  std::uint32_t request;
  bool logprobs;  // wanted for the generated token
};

struct MiniBatchWork {
  std::int32_t rows = 0;
  std::int64_t first_row = 0;  // within the iteration
  LayerTable layer;
  std::vector<BlockLoad> loads;
  BroughtBlocks brought, brought_in_window;  // into a layer without a window, and with one
  std::vector<RowStore> stores;
  std::vector<std::uint32_t> after;  // mini-batches whose stores these loads read
  std::vector<SampleWork> samples;
  std::vector<ResultRow> results;  // in the order of the head's sample rows
  std::int64_t first_result = 0;   // of the iteration's results
  bool on_host = false;            // attended on host cores, which also write its new rows
  // Rows of KV blocks that are read there, in a layer without a window and in one with it.
  std::int64_t host_rows = 0, host_rows_in_window = 0;

  const BroughtBlocks& brought_into(bool window) const {
    return window ? brought_in_window : brought;
  }
};

struct IterationWork {
  std::uint64_t iteration = 0;
  HostBlocks blocks;
  std::vector<MiniBatchWork> mini_batches;
  IterationTable table;
  std::vector<HeadChunk> head;
  std::size_t side = 0;  // of the device's tables that holds it
  HostBuffer tables;
  HostBuffer results;  // (results) SampledRow
  std::int64_t result_count = 0;
};

// A checked LayerOrder.
struct LayerOrderWork {
  std::uint64_t seq = 0;
  std::uint64_t iteration = 0;
  std::uint32_t stage = 0;
  std::vector<std::uint32_t> mini_batches;
  std::vector<messages::WeightFetch> fetch;
};

// Host buffers that are used again: making one is slow on a GPU's host.
class HostBuffers {
 public:
  explicit HostBuffers(Device& device) : device_(device) {}
  HostBuffer take(Bytes size);
  void give_back(HostBuffer buffer);

 private:
  Device& device_;
  std::vector<HostBuffer> free_;
};

// `after`: for each mini-batch, as the order check found it.
IterationWork make_work(const messages::Iteration& iteration,
                        std::vector<std::vector<std::uint32_t>> after, const HostBlocks& blocks,
                        const ModelShape& shape, const DeviceLimits& limits, HostBuffers& buffers);

LayerOrderWork make_order(const messages::LayerOrder& order, std::uint64_t seq);

// The message with what the head sampled in a finished iteration.
messages::IterationDoneT results_of(const IterationWork& work);

}  // namespace poise
