#pragma once
// The unit in which the attention of prompts is priced (Profile::prefill).

#include "common/messages_generated.h"

namespace poise {

// The new rows of a prompt's sequence times the rows that each of them sees; 0 for a single new row, which is decoding.
double prefill_pairs(const messages::Sequence& sequence);

}  // namespace poise
