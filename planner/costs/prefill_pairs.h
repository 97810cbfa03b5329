#pragma once
// The unit in which the attention of prompts is priced (Profile::prefill).

#include "common/messages_generated.h"

namespace poise {

// The new rows of a prompt's sequence times the rows that each of them sees, in a layer with this
// window (0: none); 0 for a single new row, which is decoding.
double prefill_pairs(const messages::Sequence& sequence, std::int32_t window = 0);

}  // namespace poise
