#include "common/windows/unseen_blocks.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {
namespace {

// Whether an entry of this place names a slot of the ACT buffer, or of the regenerated one, which has the same numbers.
bool is_act(messages::Where where) {
  return where == messages::Where::RegeneratedKv || where == messages::Where::Activation;
}

template <typename Struct>
std::span<const Struct> span_of(const flatbuffers::Vector<const Struct*>* vector) {
  return vector == nullptr
             ? std::span<const Struct>()
             : std::span(reinterpret_cast<const Struct*>(vector->Data()), vector->size());
}

// Slots of one buffer that a sequence sees.
class SeenSlots {
 public:
  void add(std::uint32_t slot) {
    if (slot >= seen_.size()) {
      seen_.resize(slot + 1);
    }
    seen_[slot] = true;
  }
  bool any(std::uint32_t first, std::uint32_t count) const {
    const auto begin = std::min<std::size_t>(first, seen_.size());
    const auto end = std::min<std::size_t>(begin + count, seen_.size());
    return std::find(seen_.begin() + static_cast<std::ptrdiff_t>(begin),
                     seen_.begin() + static_cast<std::ptrdiff_t>(end),
                     true) != seen_.begin() + static_cast<std::ptrdiff_t>(end);
  }

 private:
  std::vector<bool> seen_;
};

}  // namespace

LayerWindows windows_of(const ModelShape& shape) {
  LayerWindows windows;
  for (std::int32_t layer = 0; layer < shape.num_hidden_layers; ++layer) {
    windows.push_back(shape.window({static_cast<std::uint32_t>(layer)}));
  }
  return window_of(windows) > 0 ? windows : LayerWindows();
}

std::int32_t window_of(const LayerWindows& windows) {
  return windows.empty() ? 0 : std::ranges::max(windows);
}

std::int32_t window_of_all(const ModelShape& shape) {
  std::int32_t widest = 0;
  for (std::int32_t layer = 0; layer < shape.num_hidden_layers; ++layer) {
    const std::int32_t window = shape.window({static_cast<std::uint32_t>(layer)});
    if (window == 0) {
      return 0;
    }
    widest = std::max(widest, window);
  }
  return widest;
}

BlockTables::BlockTables(const messages::MiniBatch& batch)
    : sequences(span_of(batch.sequences())),
      entries(span_of(batch.entries())),
      loads(span_of(batch.loads())),
      regenerate(span_of(batch.regenerate())) {}

BlockTables::BlockTables(const messages::MiniBatchT& batch)
    : sequences(batch.sequences),
      entries(batch.entries),
      loads(batch.loads),
      regenerate(batch.regenerate) {}

SeenLines seen_lines(const BlockTables& tables, std::int32_t window) {
  if (window == 0) {
    return {.loads = std::vector<bool>(tables.loads.size(), true),
            .regenerate = std::vector<bool>(tables.regenerate.size(), true)};
  }
  SeenSlots kv, act;
  for (const messages::Sequence& sequence : tables.sequences) {
    const std::int64_t blocks = ceil_div(std::int64_t{sequence.context()}, kBlockTokens);
    for (std::int64_t j = unseen_blocks(sequence.context(), window); j < blocks; ++j) {
      const auto at = static_cast<std::size_t>(sequence.first_entry() + j);
      check(at < tables.entries.size(), "a sequence's entries are in the table");
      const messages::AttentionEntry& entry = tables.entries[at];
      (is_act(entry.where()) ? act : kv).add(entry.slot());
    }
  }
  SeenLines seen;
  for (const messages::BlockRun& run : tables.loads) {
    seen.loads.push_back(
        (run.kind() == messages::Kind::Act ? act : kv).any(run.first_slot(), run.count()));
  }
  for (const messages::SlotRange& range : tables.regenerate) {
    seen.regenerate.push_back(act.any(range.first_slot(), range.count()));
  }
  return seen;
}

}  // namespace poise
