#pragma once
// Groups mini-batches for a layer's row-wise products (projections, MLP): a weight is read once for all
// rows of a group, and no bit of a row depends on the others. The executor computes in these groups, and
// the planner predicts and profiles with them. Pure.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/messages_generated.h"

namespace poise {

// The rows of a mini-batch, counted within its iteration.
struct BatchRows {
  std::int64_t first;
  std::int32_t count;
  bool on_host = false;  // host cores attend them
};

struct RowGroup {
  std::size_t begin, end;  // of the mini-batches
  std::int32_t rows;       // of all of them
  bool on_host = false;    // host cores attend its first mini-batch
};

// Neighbours whose rows follow one another, in as few groups as possible from the first mini-batch on,
// none of more than `max_rows`; a mini-batch of more is a group by itself. Where one group does not hold all rows,
// none has both mini-batches that host cores attend and others.
std::vector<RowGroup> row_groups(std::span<const BatchRows> batches, std::int32_t max_rows);
// The same for all mini-batches of an iteration, in their order.
std::vector<RowGroup> row_groups(const messages::IterationT& iteration, std::int32_t max_rows);

// The group whose queries are made before all others', so that host cores attend while the device computes the groups
// that come first in the list: the first of those of host cores. Null where it is the first group anyway.
const RowGroup* sent_ahead(std::span<const RowGroup> groups);

}  // namespace poise
