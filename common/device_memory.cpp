#include "common/device_memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

#include "common/families/rotary.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr std::int64_t kAlignment = 256;     // of every buffer and of every weight in a slab
constexpr std::int64_t kPanelRows = 16;      // a matrix is kept in panels of as many rows
constexpr std::int32_t kMaxCount = 1 << 24;  // of anything; keeps all products within 64 bits
constexpr std::int32_t kTableArrays = 4;     // arrays in a table at most, each aligned
constexpr std::int64_t kFloat = 4;           // what stands between operations

Bytes aligned(std::int64_t bytes) { return {round_up(bytes, kAlignment)}; }

void check_count(const char* name, std::int32_t count, std::int32_t least) {
  if (count < least || count > kMaxCount) {
    fail("{} is {}: it must be {} to {}", name, count, least, kMaxCount);
  }
}

void check_limits(const ModelShape& shape, const DeviceLimits& limits) {
  if (limits.resident_layers < 0 || limits.resident_layers > shape.num_hidden_layers) {
    fail("resident_layers is {}: the model has {} layers", limits.resident_layers,
         shape.num_hidden_layers);
  }
  check_count("max_rows", limits.max_rows, 1);
  check_count("max_mini_batch_rows", limits.max_mini_batch_rows, 1);
  check_count("max_sequences", limits.max_sequences, 1);
  check_count("act_slots", limits.act_slots, 0);
  check_count("kv_slots", limits.kv_slots, 0);
  check_count("gpu_act_blocks", limits.gpu_act_blocks, 0);
  check_count("gpu_kv_blocks", limits.gpu_kv_blocks, 0);
  check_count("logits_rows", limits.logits_rows, 1);
  check_count("max_context", limits.max_context, 1);
  check_count("logit_edits", limits.logit_edits, 0);
  if (limits.sides < kFewestSides || limits.sides > kMostSides) {
    fail("sides is {}: it must be {} to {}", limits.sides, kFewestSides, kMostSides);
  }
  if (limits.act_slots + limits.kv_slots == 0) {
    fail("act_slots and kv_slots are both 0: attention needs at least one slot");
  }
}

// The place of each row, for models that turn heads: of new rows once an iteration, of regenerated
// ones once a mini-batch and layer.
std::int64_t place_bytes(const ModelShape& shape, std::int64_t rows) {
  return shape.turns_heads() ? rows * kRotaryPlaceBytes + kAlignment : 0;
}

Bytes batch_table_bytes(const ModelShape& shape, const DeviceLimits& limits) {
  return aligned(limits.max_mini_batch_rows * kRowMoveBytes +
                 place_bytes(shape, std::int64_t{limits.act_slots} * kBlockTokens) +
                 limits.max_entries() * kContextBlockBytes +
                 limits.max_sequences * kAttentionSequenceBytes + kTableArrays * kAlignment);
}

// Token and position of each row; where it goes for the head, and at most two samples of it.
Bytes iteration_table_bytes(const ModelShape& shape, const DeviceLimits& limits) {
  constexpr std::int64_t kToken = sizeof(std::int32_t);
  return aligned(limits.max_rows * (2 * kToken + kRowMoveBytes + 2 * kSampleRowBytes) +
                 place_bytes(shape, limits.max_rows) + kTableArrays * kAlignment);
}

// Of one row's queries.
std::int64_t absorbed_bytes(const ModelShape& shape, std::int32_t max_context) {
  return shape.num_attention_heads *
         absorbed_row_floats(shape.hidden_size, shape.head_dim, max_context) * kFloat;
}

struct WeightSizes {
  Bytes outer, layer, unpacked;
};

WeightSizes weight_sizes(const ModelShape& shape, DType dtype) {
  const WeightLayout layout = weight_layout(shape, dtype);
  WeightSizes sizes{.outer = device_slab(layout.outer, dtype).bytes,
                    .layer = device_slab(layout.layer, dtype).bytes,
                    .unpacked = {}};
  for (const WeightEntry& entry : layout.layer.entries) {
    sizes.unpacked += entry.packed ? unpacked_bytes(entry.rows, entry.cols, dtype) : Bytes{};
  }
  return sizes;
}

// The same, kept for the model that was asked for last: planning asks for one model's at each trial.
WeightSizes last_weight_sizes(const ModelShape& shape, DType dtype) {
  struct Kept {
    ModelShape shape;
    DType dtype;
    WeightSizes sizes;
  };
  static thread_local std::optional<Kept> last;
  if (!last || !(last->shape == shape) || last->dtype != dtype) {
    last = Kept{shape, dtype, weight_sizes(shape, dtype)};
  }
  return last->sizes;
}

class Table {
 public:
  void add(std::string name, Bytes bytes, std::string what) {
    if (bytes.n > 0) {
      plan_.total += bytes;
      plan_.lines.push_back({std::move(name), bytes, std::move(what)});
    }
  }
  DeviceMemoryPlan finish() { return std::move(plan_); }

 private:
  DeviceMemoryPlan plan_;
};

}  // namespace

bool is_panelled(const WeightEntry& entry) {
  return entry.matrix() && !entry.packed && entry.weight != Weight::position_embedding;
}

DeviceSlab device_slab(const Slab& slab, DType dtype) {
  DeviceSlab result;
  std::int64_t end = 0;
  for (const WeightEntry& entry : slab.entries) {
    result.offsets.push_back(static_cast<std::uint64_t>(end));
    const std::int64_t rows = is_panelled(entry) ? round_up(entry.rows, kPanelRows) : entry.rows;
    const std::int64_t bytes =
        is_panelled(entry) ? rows * entry.cols * size_of(dtype).n : entry.bytes.n;
    end = round_up(end + bytes, kAlignment);
  }
  result.bytes = {end};
  return result;
}

Bytes unpacked_bytes(std::int32_t rows, std::int32_t cols, DType dtype) {
  return aligned(round_up(rows, kPanelRows) * cols * size_of(dtype).n);
}

DeviceSizes device_sizes(const ModelShape& shape, DType dtype, const DeviceLimits& limits) {
  const WeightSizes weights = last_weight_sizes(shape, dtype);
  const BlockSizes blocks = block_sizes(shape, dtype, limits.kv_format);
  const bool quantizes = limits.kv_format != KvFormat::plain;
  const std::int64_t rows = limits.max_mini_batch_rows;
  const std::int64_t width = std::max(shape.hidden_size, shape.word_embed_proj_dim);
  const std::int64_t logits_rows = limits.logits_rows;
  const bool streams = limits.resident_layers < shape.num_hidden_layers;
  return {
      .outer_slab = weights.outer,
      .layer_slab = weights.layer,
      .layer_buffer = streams ? weights.layer : Bytes{0},
      .unpacked = weights.unpacked,
      .act_buffer = aligned(blocks.block(BlockKind::act).n * limits.act_slots),
      .kv_buffer = aligned(blocks.block(BlockKind::kv).n * limits.kv_slots),
      .regenerated = aligned(blocks.block(BlockKind::kv).n * limits.act_slots),
      .context_blocks = Bytes{static_cast<std::int64_t>(device_pool(blocks, limits).region_bytes)} *
                        shape.num_hidden_layers,
      .hidden = aligned(std::int64_t{limits.max_rows} * shape.hidden_size * kFloat),
      .new_act = aligned(rows * blocks.act_row.n),
      .new_kv = aligned(rows * blocks.kv_row.n),
      .plain_kv = quantizes ? aligned(std::max<std::int64_t>(rows, kBlockTokens) *
                                      kv_row_layout(shape, dtype, KvFormat::plain).row)
                            : Bytes{0},
      .q = aligned(rows * shape.q_dim() * kFloat),
      .attended = aligned(rows * shape.q_dim() * kFloat),
      .normed = aligned(rows * width * kFloat),
      .mlp = aligned(
          std::max(rows *
                       (shape.projects_embeddings() ? std::max<std::int64_t>(shape.fc1_dim(), width)
                                                    : std::int64_t{shape.fc1_dim()}) *
                       kFloat,
                   limits.absorbed_rows() * absorbed_bytes(shape, limits.max_context))),
      .rotary = aligned(std::int64_t{frequency_sets(shape)} * rotary_pairs(shape) * kFloat),
      .head_rows = aligned(logits_rows * shape.hidden_size * kFloat),
      .head_normed = aligned(logits_rows * shape.hidden_size * kFloat),
      .head_projected = shape.projects_embeddings()
                            ? aligned(logits_rows * shape.word_embed_proj_dim * kFloat)
                            : Bytes{0},
      .logits = aligned(logits_rows * shape.vocab_size * kFloat),
      .sampled = aligned(2 * logits_rows * kSampledRowBytes),
      .logit_edits = aligned(std::int64_t{limits.logit_edits} * kLogitEditBytes),
      .batch_tables = batch_table_bytes(shape, limits),
      .iteration_tables = iteration_table_bytes(shape, limits),
  };
}

PoolPartition device_pool(const BlockSizes& sizes, const DeviceLimits& limits) {
  const Bytes region = sizes.block(BlockKind::act) * limits.gpu_act_blocks +
                       sizes.block(BlockKind::kv) * limits.gpu_kv_blocks;
  return {.region_bytes = static_cast<std::uint64_t>(aligned(region.n).n),
          .act_blocks = static_cast<std::uint32_t>(limits.gpu_act_blocks),
          .kv_blocks = static_cast<std::uint32_t>(limits.gpu_kv_blocks)};
}

Bytes device_memory(const ModelShape& shape, DType dtype, const DeviceLimits& limits,
                    Bytes overhead) {
  check_limits(shape, limits);
  const DeviceSizes sizes = device_sizes(shape, dtype, limits);
  return sizes.outer_slab + sizes.layer_slab * limits.resident_layers + sizes.unpacked +
         sizes.regenerated + sizes.context_blocks + sizes.plain_kv + sizes.rotary + sizes.hidden +
         sizes.q + sizes.attended + sizes.normed + sizes.mlp + sizes.head_rows + sizes.head_normed +
         sizes.head_projected + sizes.logits + overhead +
         (sizes.act_buffer + sizes.kv_buffer + sizes.batch_tables) * limits.sides +
         (sizes.layer_buffer + sizes.new_act + sizes.new_kv + sizes.sampled + sizes.logit_edits +
          sizes.iteration_tables) *
             2;
}

DeviceMemoryPlan plan_device_memory(const ModelShape& shape, DType dtype,
                                    const DeviceLimits& limits, Bytes overhead) {
  check_limits(shape, limits);
  const DeviceSizes sizes = device_sizes(shape, dtype, limits);
  Table table;
  table.add("outer weights", sizes.outer_slab, "embeddings, final norm, head");
  table.add(
      "resident weights", sizes.layer_slab * limits.resident_layers,
      fmt::format("{} of {}", limits.resident_layers, counted(shape.num_hidden_layers, "layer")));
  table.add("streamed weights", sizes.layer_buffer * 2, "two layers at a time");
  table.add("unpacked weights", sizes.unpacked, "one layer's matrices");
  const auto of_sides = [&](std::int32_t slots) {
    return fmt::format("{} × {}", limits.sides, counted(slots, "block"));
  };
  table.add("ACT buffers", sizes.act_buffer * limits.sides, of_sides(limits.act_slots));
  table.add("KV buffers", sizes.kv_buffer * limits.sides, of_sides(limits.kv_slots));
  table.add("regenerated KV", sizes.regenerated, counted(limits.act_slots, "block"));
  table.add("context blocks", sizes.context_blocks,
            fmt::format("{} ACT and {} in each of {}", limits.gpu_act_blocks,
                        counted(limits.gpu_kv_blocks, "KV block"),
                        counted(shape.num_hidden_layers, "layer")));
  table.add("hidden states", sizes.hidden, counted(limits.max_rows, "row"));
  table.add("new K, V and ACT rows", (sizes.new_act + sizes.new_kv) * 2,
            "2 × " + counted(limits.max_mini_batch_rows, "row"));
  table.add("K and V rows, plain", sizes.plain_kv,
            fmt::format("before they are {}", name_of(limits.kv_format)));
  table.add("attention and MLP rows", sizes.q + sizes.attended + sizes.normed + sizes.mlp,
            counted(limits.max_mini_batch_rows, "row"));
  table.add("rotary frequencies", sizes.rotary, counted(frequency_sets(shape), "set"));
  table.add(
      "logits",
      sizes.head_rows + sizes.head_normed + sizes.head_projected + sizes.logits + sizes.sampled * 2,
      fmt::format("{} of {}", counted(limits.logits_rows, "row"), shape.vocab_size));
  table.add("edits of logits", sizes.logit_edits * 2, "2 × " + counted(limits.logit_edits, "edit"));
  table.add("tables", sizes.batch_tables * limits.sides + sizes.iteration_tables * 2,
            fmt::format("{} × {}, 2 × {}", limits.sides, counted(limits.max_entries(), "entry"),
                        counted(limits.max_rows, "row")));
  table.add("device overhead", overhead, "context, library workspaces");
  DeviceMemoryPlan plan = table.finish();
  check(plan.total == device_memory(shape, dtype, limits, overhead), "every buffer has its line");
  return plan;
}

DeviceLimits with_resident_layers(const ModelShape& shape, DType dtype, DeviceLimits limits,
                                  Bytes overhead, Bytes cap) {
  limits.resident_layers = shape.num_hidden_layers;
  if (device_memory(shape, dtype, limits, overhead) <= cap) {
    return limits;
  }
  limits.resident_layers = 0;
  const DeviceMemoryPlan none = plan_device_memory(shape, dtype, limits, overhead);
  check_fits(none, cap);
  const Bytes layer = device_sizes(shape, dtype, limits).layer_slab;
  const std::int64_t spare = (cap - none.total) / layer;
  // With all layers resident the two buffers of streamed ones would not be needed; that case did
  // not fit.
  limits.resident_layers = static_cast<std::int32_t>(
      std::min(spare, static_cast<std::int64_t>(shape.num_hidden_layers) - 1));
  return limits;
}

DeviceLimits with_gpu_blocks(const ModelShape& shape, DType dtype, DeviceLimits limits,
                             Bytes overhead, Bytes cap, BlockKind kind, std::int64_t wanted) {
  std::int32_t& blocks = kind == BlockKind::act ? limits.gpu_act_blocks : limits.gpu_kv_blocks;
  blocks = 0;
  // A layer's region is rounded up to the alignment, and so are the tables.
  const Bytes left = cap - device_memory(shape, dtype, limits, overhead) -
                     Bytes{kAlignment} * (shape.num_hidden_layers + limits.sides);
  // Each KV block is also an entry of each side's tables.
  const Bytes entries =
      kind == BlockKind::kv ? Bytes{limits.sides * kContextBlockBytes} : Bytes{0};
  const Bytes each =
      block_sizes(shape, dtype, limits.kv_format).block(kind) * shape.num_hidden_layers + entries;
  blocks = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(left / each, 0, std::min<std::int64_t>(wanted, kMaxCount)));
  return limits;
}

void check_fits(const DeviceMemoryPlan& plan, Bytes cap) {
  if (plan.total <= cap) {
    return;
  }
  std::string lines;
  for (const DeviceMemoryLine& line : plan.lines) {
    lines += (lines.empty() ? "" : ", ") + fmt::format("{} {}", line.name, size_text(line.bytes));
  }
  fail(
      "device memory: {} are needed ({}), {} are allowed: raise --gpu-memory or make batches "
      "smaller",
      size_text(plan.total), lines, size_text(cap));
}

std::string to_text(const DeviceMemoryPlan& plan) {
  std::string text;
  for (const DeviceMemoryLine& line : plan.lines) {
    text += fmt::format("{:<24}{:>12}  {}\n", line.name, size_text(line.bytes), line.what);
  }
  return text + fmt::format("{:<24}{:>12}\n", "total", size_text(plan.total));
}

}  // namespace poise
