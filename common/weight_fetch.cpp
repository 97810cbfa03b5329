#include "common/weight_fetch.h"

#include <algorithm>

namespace poise {

bool fetches(std::span<const messages::WeightFetch> fetched, const WeightLayout& layout,
             LayerId layer, Weight weight) {
  const WeightEntry* entry = layout.layer.find(weight);
  return entry != nullptr && std::ranges::any_of(fetched, [&](const messages::WeightFetch& one) {
           return one.layer() == layer.n &&
                  one.piece() >= static_cast<std::uint32_t>(entry->piece) &&
                  one.piece() <= static_cast<std::uint32_t>(entry->last_piece);
         });
}

}  // namespace poise
