#include "common/row_groups.h"

#include <algorithm>

namespace poise {

std::vector<RowGroup> row_groups(std::span<const BatchRows> batches, std::int32_t max_rows) {
  std::int64_t all = 0;
  for (const BatchRows& rows : batches) {
    all += rows.count;
  }
  std::vector<RowGroup> groups;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const BatchRows& rows = batches[i];
    const bool joins = i > 0 && rows.first == batches[i - 1].first + batches[i - 1].count &&
                       groups.back().rows <= max_rows - rows.count &&
                       (all <= max_rows || rows.on_host == batches[i - 1].on_host);
    if (!joins) {
      groups.push_back({.begin = i, .end = i, .rows = 0, .on_host = rows.on_host});
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
    const bool on_host = !batch->entries.empty() &&
                         batch->entries[0].where() == messages::Where::HostInPlace;
    batches.push_back({.first = first,
                       .count = static_cast<std::int32_t>(batch->tokens.size()),
                       .on_host = on_host});
    first += batches.back().count;
  }
  return row_groups(batches, max_rows);
}

const RowGroup* sent_ahead(std::span<const RowGroup> groups) {
  const auto first = std::ranges::find(groups, true, &RowGroup::on_host);
  return first == groups.begin() || first == groups.end() ? nullptr : &*first;
}

}  // namespace poise
