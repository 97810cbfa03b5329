#include "planner/costs/prefill_pairs.h"

#include <algorithm>

namespace poise {

double prefill_pairs(const messages::Sequence& sequence, std::int32_t window) {
  const double rows = sequence.new_tokens();
  if (rows <= 1) {
    return 0;
  }
  const double all = rows * (sequence.context() + (rows + 1) / 2);
  // Before the windows lie `lost` of the positions up to the last row, one fewer up to the row before …
  const double lost = sequence.context() + rows - window;
  if (window == 0 || lost <= 0) {
    return all;
  }
  const double cut = std::min(rows, lost);  // rows that lose some
  return all - cut * (lost - (cut - 1) / 2);
}

}  // namespace poise
