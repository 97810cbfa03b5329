#pragma once
// The arithmetic that policies share for their first two questions: a split of the host's bytes at
// a given share of ACT blocks, and the rule that keeps a request at the host's ratio as it grows
// (CAPTURE Eq. 5, HybridServe Eq. 11). Pure functions.

#include "planner/policies/policy.h"

namespace poise {

// A layer's region of the blocks segment is a multiple of this (common/blocks.h).
inline constexpr std::int64_t kRegionAlignment = 4096;

// Of `inputs.host`, as many blocks as fit and as the requests can use, `act_share` of them ACT
// blocks. Shares count blocks, not bytes: with grouped queries an ACT block is the larger one.
Allocation split_host(const AllocationInputs& inputs, double act_share);

// Blocks of a mini-batch when all requests are under way: as many as one may hold, or the largest
// request alone, and never more than the requests can fill.
std::int64_t blocks_of_mini_batch(const AllocationInputs& inputs);
// The same inputs for requests that all fit into one mini-batch at a time: a row-by-row schedule.
AllocationInputs one_mini_batch(const AllocationInputs& inputs);

// The kind that keeps act : kv nearest to the ratio of all blocks, those on the device included; an
// ACT block if both are equally near.
BlockKind keep_ratio(const Allocation& host, const RequestSplit& request);

}  // namespace poise
