#pragma once
// A request's wishes of its logits (planner/requests/request.h) as the edits that an order carries: a
// function of the request and its answer so far alone, so that a preempted, resumed or replayed request
// samples the same tokens. Pure.

#include <span>
#include <vector>

#include "common/messages_generated.h"
#include "planner/requests/request.h"

namespace poise {

// By token, each once; tokens that stay as they are have none. Which tokens may be sampled at all, a mask says.
std::vector<messages::LogitEdit> logit_edits(const SamplingParams& sampling,
                                             std::span<const TokenId> answer);

}  // namespace poise
