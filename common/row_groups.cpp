#include "common/row_groups.h"

namespace poise {

std::vector<RowGroup> row_groups(std::span<const BatchRows> batches, std::int32_t max_rows) {
  std::vector<RowGroup> groups;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const BatchRows& rows = batches[i];
    const bool joins = i > 0 && rows.first == batches[i - 1].first + batches[i - 1].count &&
                       groups.back().rows <= max_rows - rows.count;
    if (!joins) {
      groups.push_back({.begin = i, .end = i, .rows = 0});
    }
    groups.back().end = i + 1;
    groups.back().rows += rows.count;
  }
  return groups;
}

std::vector<RowGroup> row_groups(const messages::IterationT& iteration, std::int32_t max_rows) {
  std::vector<BatchRows> batches;
  std::int64_t first = 0;
  for (const auto& batch : iteration.mini_batches) {
    batches.push_back({.first = first, .count = static_cast<std::int32_t>(batch->tokens.size())});
    first += batches.back().count;
  }
  return row_groups(batches, max_rows);
}

}  // namespace poise
