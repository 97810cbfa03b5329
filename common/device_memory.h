#pragma once
// How much memory the executor takes of its device, computed before it takes any. The same table is
// printed at start, refused with its numbers if it does not fit, and compared with what was really
// allocated. These are pure functions: the planner decides and the executor obeys with the same
// arithmetic. The sizes hold for the CPU device and the CUDA device (numbers between operations are
// counted as float32); a device adds its own `overhead` (context, library workspaces).

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/blocks.h"
#include "common/kernel_limits.h"
#include "common/model_shape.h"
#include "common/units.h"
#include "common/weight_layout.h"

namespace poise {

// A mini-batch's loads go into one of so many sides, in turn. With two, the link stops where computation has to do
// what no load belongs to: products of many rows, and prompts. A third lets it go on for the time of one load more.
inline constexpr std::int32_t kFewestSides = 2, kMostSides = 3;

// How much work the buffers must hold. The fields are those of the Configure message.
struct DeviceLimits {
  std::int32_t resident_layers = 0;
  std::int32_t max_rows = 0;  // new-token rows in an iteration
  std::int32_t max_mini_batch_rows = 0;
  std::int32_t max_sequences = 0;  // in a mini-batch
  std::int32_t act_slots = 0;      // of each ACT buffer, and of the regenerated buffer
  std::int32_t kv_slots = 0;       // of each KV buffer
  std::int32_t logits_rows = 0;
  std::int32_t max_context = 0;
  std::int32_t gpu_act_blocks = 0;  // ACT blocks that stay on the device, in every layer
  std::int32_t gpu_kv_blocks = 0;   // KV blocks likewise
  // Of the samples of logits_rows rows together; of one in any case. A mask of tokens counts as mask_edits.
  std::int32_t logit_edits = 0;
  std::int32_t sides = kFewestSides;
  KvFormat kv_format = KvFormat::plain;
  bool host_attention = false;  // sequences may be attended on host cores
  bool absorption = false;  // single new rows may attend activations (common/families/absorption.h)

  // KV slots of a mini-batch: those of a KV buffer, then some without memory, for KV blocks that stay on
  // the device: attention reads these where they lie.
  std::int64_t all_kv_slots() const { return std::int64_t{kv_slots} + gpu_kv_blocks; }
  // Rows for which AbsorbedAttention has room at a time, at least.
  std::int32_t absorbed_rows() const {
    return absorption ? std::min({kAbsorbedRows, max_mini_batch_rows, max_sequences}) : 0;
  }
  // Attention entries in a mini-batch: one for each slot.
  std::int64_t max_entries() const { return act_slots + all_kv_slots(); }

  friend bool operator==(const DeviceLimits&, const DeviceLimits&) = default;
};

// GPU memory that page tables take for pinned host memory: 8 bytes for each page of 4 KiB (107 GB
// took 0.2 GiB on an H200).
constexpr Bytes page_tables_of(Bytes pinned) { return {ceil_div(pinned.n, 512)}; }

// Which of the model's `layers` decoder layers keep their weights on the device: `resident_layers`
// of them, spread evenly, so that the link has time between any two streamed layers. Planner and
// executor both use this rule.
inline bool is_resident(const DeviceLimits& limits, LayerId layer, std::int32_t layers) {
  const auto before = [&](std::int64_t n) { return ceil_div(n * limits.resident_layers, layers); };
  return before(std::int64_t{layer.n} + 1) > before(layer.n);
}

// A slab as the device keeps it: the same weights in the same order, with the rows of matrices padded
// to whole panels of 16 (the layer matrices of real models need no padding).
struct DeviceSlab {
  Bytes bytes;
  std::vector<std::uint64_t> offsets;  // of each of the slab's entries
};
DeviceSlab device_slab(const Slab& slab, DType dtype);
// Of a packed matrix among `unpacked`.
Bytes unpacked_bytes(std::int32_t rows, std::int32_t cols, DType dtype);
// Whether a weight is kept in panels: matrices that a Gemm multiplies with or that tokens are looked
// up in. Other weights, packed matrices among them, are copied unchanged.
bool is_panelled(const WeightEntry& entry);

// Records of the tables that a device reads, in bytes (kernels/kernels.h).
inline constexpr std::int64_t kRowMoveBytes = 16;
inline constexpr std::int64_t kContextBlockBytes = 8;
inline constexpr std::int64_t kAttentionSequenceBytes = 16;
inline constexpr std::int64_t kSampleRowBytes = 64;
inline constexpr std::int64_t kLogitEditBytes = 16;
inline constexpr std::int64_t kSampledRowBytes = 172;
inline constexpr std::int64_t kRotaryPlaceBytes = 8;

// Of a mask of tokens: words of 32 tokens, and the edits of logits in whose room it stands.
constexpr std::int32_t mask_words(std::int32_t vocab_size) {
  return static_cast<std::int32_t>(ceil_div(vocab_size, 32));
}
constexpr std::int32_t mask_edits(std::int32_t vocab_size) {
  return static_cast<std::int32_t>(
      ceil_div(std::int64_t{mask_words(vocab_size)} * 4, kLogitEditBytes));
}

// Every buffer the executor allocates, each with its size; a buffer of 0 bytes is not needed.
struct DeviceSizes {
  Bytes outer_slab;      // embeddings, projections, final norm, head
  Bytes layer_slab;      // one decoder layer
  Bytes layer_buffer;    // of each of two, for streamed layers
  Bytes unpacked;        // a layer's packed matrices as numbers, for devices that multiply those
  Bytes act_buffer;      // of each side
  Bytes kv_buffer;       // of each side
  Bytes regenerated;     // keys and values made from the ACT buffer
  Bytes context_blocks;  // ACT and KV blocks that stay: (layers, device_pool's region)
  Bytes hidden;          // (max_rows, hidden_size), all rows of an iteration
  Bytes new_act;         // of each of two: (max_mini_batch_rows, hidden_size)
  Bytes new_kv;          // of each of two: max_mini_batch_rows rows of KV blocks
  Bytes plain_kv;        // what is quantised next: (max_mini_batch_rows, 2 · kv_dim)
  Bytes q, attended;     // (max_mini_batch_rows, q_dim)
  Bytes normed;          // (max_mini_batch_rows, max(hidden_size, word_embed_proj_dim))
  Bytes mlp;        // (max_mini_batch_rows, fc1_dim), also projected embeddings' input, and before
                    // that absorbed queries: room for absorbed_rows at least
  Bytes rotary;     // (frequency_sets, rotary_pairs) of float32
  Bytes head_rows;  // (logits_rows, hidden_size)
  Bytes head_normed;       // (logits_rows, hidden_size)
  Bytes head_projected;    // (logits_rows, word_embed_proj_dim), models that project
  Bytes logits;            // (logits_rows, vocab_size)
  Bytes sampled;           // of each of two: (2 · logits_rows) records
  Bytes logit_edits;       // of each of two: (logit_edits)
  Bytes batch_tables;      // of each side: what one mini-batch needs in a layer
  Bytes iteration_tables;  // of each of two: what an iteration's embedding and head need
};
DeviceSizes device_sizes(const ModelShape& shape, DType dtype, const DeviceLimits& limits);
// Where the blocks that stay on the device lie within `context_blocks`.
PoolPartition device_pool(const BlockSizes& sizes, const DeviceLimits& limits);

struct DeviceMemoryLine {
  std::string name;  // "resident weights"
  Bytes bytes;
  std::string what;  // "12 of 48 layers"
};

struct DeviceMemoryPlan {
  std::vector<DeviceMemoryLine> lines;
  Bytes total;
};

// Fails and names the limit if a count is not positive, larger than the model allows, or larger than
// 2^24.
DeviceMemoryPlan plan_device_memory(const ModelShape& shape, DType dtype,
                                    const DeviceLimits& limits, Bytes overhead);

// Its total alone, which planning asks for at each trial.
Bytes device_memory(const ModelShape& shape, DType dtype, const DeviceLimits& limits,
                    Bytes overhead);

// `limits` with as many resident layers as `cap` allows beside the rest; fails as check_fits does if
// the rest alone does not fit.
DeviceLimits with_resident_layers(const ModelShape& shape, DType dtype, DeviceLimits limits,
                                  Bytes overhead, Bytes cap);
// `limits` with as many blocks of a kind on the device as `cap` allows beside the rest, at most
// `wanted`.
DeviceLimits with_gpu_blocks(const ModelShape& shape, DType dtype, DeviceLimits limits,
                             Bytes overhead, Bytes cap, BlockKind kind, std::int64_t wanted);

// Fails if the plan is larger than `cap`; the sentence gives every line's MiB.
void check_fits(const DeviceMemoryPlan& plan, Bytes cap);

// The table as `run` and `doctor` print it: one aligned line for each buffer.
std::string to_text(const DeviceMemoryPlan& plan);

}  // namespace poise
