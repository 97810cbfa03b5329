#pragma once
// The model's arithmetic as launches on the compute stream: the embedding, one decoder layer for a row group
// (one or several mini-batches, common/row_groups.h), and the head, each in the order of operations of
// transformers. The shape's switches say which operations there are. Everything lies in device memory; the
// pipeline queues the waits for it, through LayerHooks and between the calls. Owns the buffers between
// operations; nothing in them outlives a call.

#include <functional>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "gpu_executor/device.h"
#include "gpu_executor/weights_on_device.h"
#include "kernels/kernels.h"

namespace poise {

// A mini-batch's rows in stage 0.
struct EmbedInput {
  const std::int32_t* tokens;     // (rows)
  const std::int32_t* positions;  // (rows)
  float* hidden;                  // (rows, hidden_size); written
  std::int32_t rows;
};

// Neighbouring blocks of the ACT buffer from which keys and values are made.
struct Regenerate {
  std::int64_t first_slot, count;
};

// Sequences of a mini-batch that one launch attends; they stand one behind the other.
struct AttendedTogether {
  std::int32_t count = 0;
  std::int32_t max_new_tokens = 0;  // of one sequence
  std::int32_t max_context = 0;     // … with its new tokens
};

// Rows of one or several mini-batches in one decoder layer: what is computed row by row is computed
// for all of them at once, so that a weight is read once. At most max_mini_batch_rows.
struct LayerRows {
  float* hidden;  // (rows, hidden_size); read and written
  std::int32_t rows;
  void* new_act;              // (rows, hidden_size) of the stored type; written
  void* new_kv;               // rows of KV blocks; written
  const RotaryPlace* places;  // (rows), models that turn heads
};

// The context of one of those mini-batches.
struct LayerContext {
  std::int64_t first_row;  // of the mini-batch, within LayerRows
  void* act;          // ACT buffer: (act_slots, block_tokens, hidden_size); read, new rows written
  void* kv;           // KV buffer: (kv_slots, block_tokens) rows of KV blocks
  void* regenerated;  // (act_slots, block_tokens) rows of KV blocks; written
  void* here;         // KV blocks that stay on the device, as in the KV buffer; read and written
  std::span<const Regenerate> regenerate;
  const RotaryPlace* act_places;     // (act_slots, block_tokens), models that turn heads
  std::int32_t window;               // of the layer; 0: none
  const RowMove* kv_moves;           // (kv_move_count) new rows into the KV buffer
  const RowMove* regenerated_moves;  // (regenerated_move_count) … into the regenerated buffer
  const RowMove* here_moves;         // (here_move_count) … into blocks that stay on the device
  const RowMove* act_moves;          // (act_move_count) new attention inputs into the ACT buffer
  const ContextBlock* blocks;
  const AttentionSequence* sequences;  // of one row, then of several, then absorbed ones, which have one row
  std::int32_t kv_move_count, regenerated_move_count, here_move_count, act_move_count;
  AttendedTogether one_row, more_rows, absorbed;
  std::int64_t absorbed_positions;  // of the absorbed ones together
};

// What attention of a mini-batch's sequences goes by.
struct AttentionTables {
  std::int32_t window;  // of the layer; 0: none
  const ContextBlock* blocks;
  const AttentionSequence* sequences;  // (together.count)
  AttendedTogether together;
};

// What the pipeline does while a layer is launched.
struct LayerHooks {
  std::function<void(Weight)> need;                // before the first launch that reads a weight
  std::function<void(messages::SpanKind)> begins;  // behind that, before a piece of the layer
  std::function<void(Weight)> unpack;              // behind that, before a matrix is read
  std::function<void()> rows_made;                 // behind the launch that made new_act and new_kv
};

// Rows of an iteration whose logits are wanted, at most `logits_rows` of them.
struct HeadInput {
  const float* hidden;           // (rows of the iteration, hidden_size)
  const RowMove* moves;          // (rows) wanted rows, to 0, 1, …
  const SampleRow* sample_rows;  // (sample_count); `row` counts wanted rows
  SampledRow* sampled;           // (sample_count); written
  LogitEdit* edits;              // of all sample rows; changed
  std::int32_t rows, sample_count;
};

class Decoder {
 public:
  Decoder(Device& device, const ModelShape& shape, DType dtype, const DeviceLimits& limits);

  void embed(const OuterWeights& weights, const EmbedInput& input);
  // A layer, for a group: `project_kv` makes the keys and values of its new rows, `project_queries`
  // their queries; for each of its mini-batches `regenerate` makes keys and values of the ACT blocks
  // (KV Gen), and `attend` reads the context; `finish` is all that follows attention. `project_kv` and
  // `regenerate` read W_K, W_V, the attention norm and the norm of K, and no other weight. Both turn the keys
  // they made (Rotate) and quantise the rows where blocks are (QuantizeKv), new rows before they are stored, so
  // a key has the same bits loaded or made again. `attend` comes last of a mini-batch; the order of the others
  // is free.
  void project_kv(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks);
  void project_queries(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks);
  void regenerate(const LayerWeights& weights, const LayerContext& context,
                  const LayerHooks& hooks);
  // `attend` reads W_K and W_V where sequences read activations as they are.
  void attend(const LayerWeights& weights, const LayerRows& rows, const LayerContext& context,
              const LayerHooks& hooks);
  void finish(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks);
  // For sequences that are attended elsewhere: the queries of a group's rows, as `project_queries` made
  // them, and where `finish` reads what attention gave, from `row` on.
  std::int64_t q_row() const { return shape_.q_dim() * size_of(work_).n; }  // bytes
  const std::byte* queries(std::int64_t row) const { return q_.data() + row * q_row(); }
  std::byte* attended(std::int64_t row) const { return attended_.data() + row * q_row(); }
  // Attention by these tables; `slots`, `q` and `out` are the caller's.
  Attention attention_of(const AttentionTables& tables) const;
  void head(const OuterWeights& weights, const HeadInput& input);

 private:
  // Rows of KV blocks of attention inputs.
  void make_kv(const LayerWeights& weights, const Rows& act, void* out, const RotaryPlace* places,
               std::int64_t rows);
  void mlp(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks);
  void norm(const Rows& out, const float* in, const void* weight, const void* bias,
            std::int32_t rows);
  // Norms and rotates the heads of queries or keys, in a model that does.
  void turn(const Rows& heads, std::int32_t count, const RotaryPlace* places,
            const void* norm_weight, std::int64_t rows);
  Rows gemm_input(float* in, std::int64_t width, const Buffer& converted, std::int32_t rows);
  Rows work_rows(const Buffer& buffer, std::int64_t width) const;
  Epilogue activation() const;
  std::int64_t kv_width() const { return 2 * std::int64_t{shape_.kv_dim()}; }

  Device& device_;
  const ModelShape shape_;
  const DType dtype_;  // of what is stored
  const DType work_;   // of what stands between operations
  const KvFormat kv_format_;
  const std::int64_t kv_row_;  // bytes in a KV block
  Buffer q_, attended_, normed_, mlp_, plain_kv_;
  Buffer head_rows_, head_normed_, head_projected_, logits_;
  Buffer frequencies_;  // (frequency_sets, rotary_pairs)
  HostBuffer frequencies_from_;
};

}  // namespace poise
