#pragma once
// Context lies in blocks of 16 tokens (common/README section 1). A KV block of a layer holds, token by
// token, its key and value: (block_tokens, 2, kv_heads, head_dim), plain or quantised
// (common/formats/kv_format.h). An ACT block holds the attention input of each token: (block_tokens,
// hidden_size). One token's row is contiguous in both, so a new row is one store, a part of a block is
// one load, and the product A·[W_K W_V]ᵀ already has the layout of a plain KV block.
//
//   one layer's region of the blocks segment, `region_bytes` long, the same in every layer:
//   | ACT 0 | ACT 1 | …  act_blocks |   free   | kv_blocks … | KV 1 | KV 0 |
//                                border moves ◄──────►
//
// Pure arithmetic on sizes; no memory is touched here. Offsets are bytes from the start of the
// blocks segment. `poise-loader --needs` tells the rows' sizes, for `doctor`.

#include <cstdint>

#include "common/formats/kv_format.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

enum class BlockKind : std::uint8_t { kv = 0, act = 1 };

struct BlockSizes {
  Bytes kv_row;   // one token's key and value
  Bytes act_row;  // one token's attention input

  Bytes row(BlockKind kind) const { return kind == BlockKind::kv ? kv_row : act_row; }
  Bytes block(BlockKind kind) const { return row(kind) * kBlockTokens; }
};

inline KvRowLayout kv_row_layout(const ModelShape& shape, DType dtype, KvFormat format) {
  return kv_row_layout(shape.num_key_value_heads, shape.head_dim, dtype, format);
}

inline BlockSizes block_sizes(const ModelShape& shape, DType dtype, KvFormat format) {
  return {.kv_row = {kv_row_layout(shape, dtype, format).row},
          .act_row = size_of(dtype) * shape.hidden_size};
}

// How many blocks of each kind a pool holds, and where. Only the loader writes the host's (control
// segment). Blocks that stay on the device have the same layout (common/device_memory.h).
struct PoolPartition {
  std::uint64_t region_bytes;  // per layer; a multiple of 4096 on the host
  std::uint32_t act_blocks;
  std::uint32_t kv_blocks;

  std::uint32_t blocks(BlockKind kind) const {
    return kind == BlockKind::kv ? kv_blocks : act_blocks;
  }
  // Whether the blocks from both ends fit into a region without overlap.
  bool fits(const BlockSizes& sizes) const {
    const auto act = static_cast<std::uint64_t>(sizes.block(BlockKind::act).n) * act_blocks;
    const auto kv = static_cast<std::uint64_t>(sizes.block(BlockKind::kv).n) * kv_blocks;
    return act <= region_bytes && kv <= region_bytes - act;
  }
  // Where a block starts in the segment. REQUIRES: block.n < blocks(kind).
  std::uint64_t offset(const BlockSizes& sizes, LayerId layer, BlockKind kind,
                       BlockId block) const {
    const auto size = static_cast<std::uint64_t>(sizes.block(kind).n);
    const std::uint64_t in_region =
        kind == BlockKind::act ? block.n * size : region_bytes - (block.n + 1) * size;
    return layer.n * region_bytes + in_region;
  }
};
static_assert(sizeof(PoolPartition) == 16);

}  // namespace poise
