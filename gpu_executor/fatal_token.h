#pragma once
// For tests of what a run does about a request that kills its executor: with POISE_FATAL_TOKEN=ID in its
// environment, an executor aborts when it is given an iteration that has this input token; with
// POISE_FATAL_TOKEN=ID:hang it computes for ever.

#include "common/messages_generated.h"

namespace poise {

void die_of_fatal_token(const messages::Iteration& iteration);

}  // namespace poise
