#pragma once
// How much of a request's context takes blocks of the pools. A block that lies before the window of every later
// row, in every layer, is dropped once its iteration is done (common/windows/unseen_blocks.h). So however long a
// request is, it keeps its window and the rows that run. Pure.

#include <algorithm>
#include <cstdint>

#include "planner/schedule/block_table.h"

namespace poise {

struct KeptContext {
  std::int32_t window = 0;  // that all layers have; 0: everything is kept

  // Rows of one request in an iteration at most: while they run, their blocks are beside the window's.
  std::int32_t rows_at_once() const {
    constexpr std::int32_t kFewestRows = 256;  // a window may be shorter than what products want
    return window == 0 ? INT32_MAX : std::max(window, kFewestRows);
  }
  // Of a request of so many blocks, those that it has between two iterations, with room for one more row …
  std::int32_t between(std::int32_t blocks) const {
    return window == 0 ? blocks : std::min(blocks, blocks_for(window) + 1);
  }
  // … and while a part of its prompt runs.
  std::int32_t at_most(std::int32_t blocks) const {
    return window == 0
               ? blocks
               : std::min<std::int32_t>(
                     blocks, blocks_for(std::int64_t{window} + rows_at_once()) + 1);
  }
  // Beside what requests have between iterations, for the parts of prompts that run.
  std::int64_t beside(std::int64_t prompt_rows) const {
    return window == 0 ? 0 : ceil_div(prompt_rows, kBlockTokens);
  }

  friend bool operator==(const KeptContext&, const KeptContext&) = default;
};

}  // namespace poise
