#pragma once
// What layers with a sliding window leave out. The row at position p of such a layer attends positions
// max(0, p - window + 1) .. p alone (kernels/kernels.h), so a block whose tokens all lie before that is
// unseen by the row and by all later ones. The tables of an iteration hold for every layer and name
// unseen blocks, too. A layer with a window carries out no load and no regeneration of which all slots
// are unseen; nothing reads such a slot there. If all layers have a window, unseen blocks need not be there at
// all. Executor and planner compute this from the same tables.
// Pure.

#include <cstdint>
#include <span>
#include <vector>

#include "common/messages_generated.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

// Blocks at the begin of a request's context that no row at `position` or behind it sees.
constexpr std::int32_t unseen_blocks(std::int64_t position, std::int32_t window) {
  return window == 0 || position < window
             ? 0
             : static_cast<std::int32_t>((position - window + 1) / kBlockTokens);
}

// Of each layer, 0 for one without; empty if no layer has one.
using LayerWindows = std::vector<std::int32_t>;
LayerWindows windows_of(const ModelShape& shape);
// The window of the layers that have one: a model has one size. 0 if no layer has one.
std::int32_t window_of(const LayerWindows& windows);

// The window beyond which no layer sees anything, if every layer has one; otherwise 0. Blocks that it leaves
// unseen are dropped: given back, and never loaded or read again (Place::Dropped).
std::int32_t window_of_all(const ModelShape& shape);

// A mini-batch's tables, in either form of the messages.
struct BlockTables {
  std::span<const messages::Sequence> sequences;
  std::span<const messages::AttentionEntry> entries;
  std::span<const messages::BlockRun> loads;
  std::span<const messages::SlotRange> regenerate;

  explicit BlockTables(const messages::MiniBatch& batch);
  explicit BlockTables(const messages::MiniBatchT& batch);
};

// By line of both tables: whether a layer with this window carries it out. REQUIRES: tables as the
// order check wants them.
struct SeenLines {
  std::vector<bool> loads, regenerate;
};
SeenLines seen_lines(const BlockTables& tables, std::int32_t window);

}  // namespace poise
