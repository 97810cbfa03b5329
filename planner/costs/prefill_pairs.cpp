#include "planner/costs/prefill_pairs.h"

namespace poise {

double prefill_pairs(const messages::Sequence& sequence) {
  const double rows = sequence.new_tokens();
  return rows > 1 ? rows * (sequence.context() + (rows + 1) / 2) : 0;
}

}  // namespace poise
